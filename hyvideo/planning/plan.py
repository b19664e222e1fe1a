"""The plan of a run: its layout, memory, operations, bytes and time, read off a rehearsal, without its hardware."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.algorithms.weights_copy import starts_at_base
from hyvideo.config.schema import Config
from hyvideo.distributed.gpus import Gpu
from hyvideo.distributed.layout import guidance_ranks, layout_of
from hyvideo.planning.assumptions import Assumptions
from hyvideo.planning.networks import Networks, read_networks
from hyvideo.planning.rehearsal import Rehearsal, rehearse
from hyvideo.training.checks import check_config

GIB = 2**30
TIMED = ("rollout", "anchor", "update")
"""Phases whose time is predicted; that of the reward's networks is not known."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of networks in one process's host memory, the process itself and what it computes with left out.

    Attributes:
        loading: the most before the run begins; what belongs on the GPU is read there tensor by tensor, but reward
            networks and adapters are made here first (`hyvideo.training.build.open_run`).
        training: what stays: offloaded shards, anchor, rewards and encoders, and the copy that `async_save` writes.
    """

    loading: float
    training: float


@dataclass(frozen=True)
class Plan:
    """What a run will need.

    Attributes:
        world_size: ranks.
        sp_size: ranks per video.
        dp_replicate: copies of the model.
        videos: videos of a round over all ranks.
        prompts: prompt groups of a round.
        updates: optimizer updates of a round.
        frames: of a video.
        size: HEIGHTxWIDTH of a video.
        checkpoints: that are on disk at most.
        networks: where the sizes of the networks are from.
        unknown_rewards: rewards counted as needing no memory.
        rehearsal: what one rank does in a round and in a validation, and what a GPU must hold.
        host: host memory of each process.
        seconds: predicted time of a round by phase; None without a GPU's speed.
        validation_seconds: predicted time of one validation; None without a GPU's speed, or without validation.
        gpu: what was planned for; None: no GPU in particular.
        assumptions: what was assumed.
    """

    world_size: int
    sp_size: int
    dp_replicate: int
    videos: int
    prompts: int
    updates: int
    frames: int
    size: str
    checkpoints: int
    networks: str
    unknown_rewards: tuple[str, ...]
    rehearsal: Rehearsal
    host: HostMemory
    seconds: dict[str, float] | None
    validation_seconds: float | None
    gpu: Gpu | None
    assumptions: Assumptions

    @property
    def needed(self) -> float:
        """GiB that a GPU must have."""
        return self.rehearsal.peak / GIB + self.reserved

    @property
    def reserved(self) -> float:
        """GiB of `needed` for what the rehearsal leaves out."""
        return self.assumptions.reserved(self.rehearsal.peak / GIB)

    @property
    def checkpoint_bytes(self) -> float:
        """Size of one checkpoint."""
        return self.rehearsal.sizes["checkpoint"]

    @property
    def flops(self) -> float:
        """Operations of a round on one rank."""
        return sum(self.rehearsal.flops.get(phase, 0) for phase in TIMED)

    @property
    def processes_per_machine(self) -> int:
        """Processes that share a machine's host memory."""
        return min(self.world_size, self.assumptions.gpus_per_node)

    @property
    def fits(self) -> bool:
        """Whether it fits into the GPU's memory; True without a GPU."""
        return self.gpu is None or self.needed <= self.gpu.memory

    @property
    def gpu_seconds_per_video(self) -> float | None:
        """Time of all GPUs together per video, with its training."""
        return None if self.seconds is None else sum(self.seconds.values()) * self.world_size / self.videos

    def as_json(self) -> dict[str, Any]:
        """Return all numbers, and what follows from them."""
        total = self.flops * self.world_size
        return asdict(self) | {
            "rehearsal": self.rehearsal.as_json(),
            "needed_gib": self.needed,
            "fits": self.fits,
            "gpu_seconds_per_video": self.gpu_seconds_per_video,
            "processes_per_machine": self.processes_per_machine,
            "flops_per_update": total / self.updates,
            "flops_per_video": total / self.videos,
        }


def make_plan(
    config: Config, *, world_size: int, gpu: Gpu | None, assumptions: Assumptions, whole: bool = False
) -> Plan:
    """Plan a run; prompts and weights need not be there. Without a `gpu`, time and fit are not predicted.

    With `whole` every block and step is rehearsed, which takes minutes.

    Raises:
        ValueError: the configuration cannot run on that many ranks; the message says what can.
    """
    networks = read_networks(config.model, config.reward)
    check_plan(config, networks, world_size)
    done = rehearse(config, networks, world_size=world_size, num_text=assumptions.num_text, whole=whole)
    layout, seconds_of = layout_of(config, world_size), _clock(config, world_size, gpu, assumptions)
    validated = "validation" in done.flops
    return Plan(
        world_size=world_size,
        sp_size=config.parallel.sp_size,
        dp_replicate=config.parallel.dp_replicate,
        videos=layout.num_videos,
        prompts=layout.num_groups,
        updates=config.grpo.updates_per_rollout,
        frames=config.rollout.sample_n_frames,
        size=config.rollout.rollout_size,
        checkpoints=config.run.most_checkpoints(),
        networks=networks.source,
        unknown_rewards=networks.unknown_rewards,
        rehearsal=done,
        host=_host_memory(config, networks, done, world_size),
        seconds=seconds_of and {phase: seconds_of(done, phase) for phase in TIMED},
        validation_seconds=seconds_of(done, "validation") if seconds_of and validated else None,
        gpu=gpu,
        assumptions=assumptions,
    )


def misfit(plan: Plan) -> str:
    """Say that a plan does not fit."""
    return (
        f"the run needs {plan.needed:.1f} GiB per GPU ({plan.reserved:.1f} of them in reserve), but "
        f"{plan.gpu.name} has {plan.gpu.memory:g}."
    )


def check_plan(config: Config, networks: Networks, world_size: int) -> None:
    """Refuse a layout that cannot run.

    Raises:
        ValueError: every violated rule.
    """
    if world_size > 2**16:  # the more there are, the longer it takes
        raise ValueError(f"--world_size must be at most 65536; received {world_size}.")
    vae, guided = networks.vae, config.rollout.is_guided
    check_config(config, world_size, vae["spatial_compression_ratio"], vae["temporal_compression_ratio"], files=False)
    heads, sharing = networks.transformer["num_attention_heads"], token_ranks(config)
    if heads % sharing:
        possible = (n for n in range(1, 2 * heads + 1) if world_size % n == 0)
        choices = [str(n) for n in possible if heads % (n // guidance_ranks(n, guided=guided)) == 0]
        raise ValueError(
            f"sp_size {config.parallel.sp_size} lets {sharing} ranks share the {heads} attention heads, "
            f"which they do not divide: set it to one of {', '.join(choices)}."
        )


def token_ranks(config: Config) -> int:
    """Return how many ranks share the tokens of a row."""
    sp_size = config.parallel.sp_size
    return sp_size // guidance_ranks(sp_size, guided=config.rollout.is_guided)


def _host_memory(config: Config, networks: Networks, done: Rehearsal, world_size: int) -> HostMemory:
    """Work out what one process holds in host memory; the rehearsal counts what is on the GPU alone."""
    sizes, offload = done.sizes, config.parallel.offload
    sharded = config.parallel.enable_fsdp and (world_size > 1 or "weights" in offload)
    shards = layout_of(config, world_size).num_shards if sharded else 1
    resting = networks.reward_bytes if "reward" in offload else 0
    resting += sizes["encoders"] if "encoders" in offload else 0
    kept = sizes["checkpoint"] if config.run.async_save else 0
    if "weights" in offload:
        kept += sizes["checkpoint"] + sizes["weights"]  # the weights that are not trained, and gradients
    else:
        copies = algorithm_class(config.grpo.algorithm).num_copies(config) if "anchor" in offload else 0
        copies += bool(config.optimizer.ema_decay) and "ema" in offload
        kept += sizes["trained"] * copies
    if config.rollout.base_interval and not starts_at_base(config.model):
        kept += sizes["trained"]
    adapter = sizes["trained"] if config.model.use_lora else 0  # whole in every process
    base = (sizes["weights"] - adapter) / shards if sharded and "weights" in offload else 0
    return HostMemory(max(networks.reward_bytes, resting + adapter + base), kept / shards + resting)


def _clock(
    config: Config, world_size: int, gpu: Gpu | None, assumptions: Assumptions
) -> Callable[[Rehearsal, str], float] | None:
    """Return what predicts the time of a phase; None where the GPU's speed is not known."""
    if gpu is None or not gpu.teraflops:
        return None
    parallel = config.parallel
    shards = layout_of(config, world_size).num_shards if parallel.enable_fsdp else 1
    links = {  # bytes per second; within a machine where the group of ranks fits into one
        whose: 1e9 * (gpu.link if size <= assumptions.gpus_per_node else assumptions.network)
        for whose, size in (("weights", shards), ("copies", world_size), ("tokens", parallel.sp_size))
    }
    rate = gpu.teraflops * 1e12 * assumptions.utilisation

    def seconds(done: Rehearsal, phase: str) -> float:
        """Weights are sent during the computation, tokens between its parts."""
        sending = {whose: done.sent_in(phase, whose) / link for whose, link in links.items()}
        return max(done.flops.get(phase, 0) / rate, sending["weights"] + sending["copies"]) + sending["tokens"]

    return seconds
