"""The plan of a run: its layout, memory, operations, bytes and time, predicted without its hardware."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.config.schema import Config
from hyvideo.distributed.gpus import Gpu
from hyvideo.distributed.layout import guidance_ranks, layout_of
from hyvideo.planning.assumptions import Assumptions
from hyvideo.planning.host_memory import HostMemory, host_memory
from hyvideo.planning.memory import Memory, PeaksOf, predict_memory
from hyvideo.planning.networks import Networks, read_networks
from hyvideo.planning.simulation import policy_network
from hyvideo.planning.traffic import ParameterCounts, count_parameters
from hyvideo.planning.workload import PhaseWork, Workload, token_ranks, workload
from hyvideo.training.build import DTYPES
from hyvideo.training.checks import check_config

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """What a run will need.

    Attributes:
        world_size: ranks.
        sp_size: ranks per video.
        dp_replicate: copies of the model.
        videos: videos of a round over all ranks.
        prompts: prompt groups of a round.
        frames: of a video.
        size: HEIGHTxWIDTH of a video.
        networks: where the sizes of the networks are from.
        unknown_rewards: rewards counted as needing no memory.
        parameters: weights of the transformer.
        memory: of each GPU.
        host: host memory of each process.
        workload: of each rank.
        checkpoint_bytes: of one checkpoint.
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
    frames: int
    size: str
    networks: str
    unknown_rewards: tuple[str, ...]
    parameters: ParameterCounts
    memory: Memory
    host: HostMemory
    workload: Workload
    checkpoint_bytes: int
    seconds: dict[str, float] | None
    validation_seconds: float | None
    gpu: Gpu | None
    assumptions: Assumptions

    @property
    def needed(self) -> float:
        """GiB that a GPU must have."""
        return self.memory.peak / GIB + self.reserved

    @property
    def reserved(self) -> float:
        """GiB of `needed` for what the simulation leaves out."""
        return self.assumptions.reserved(self.memory.peak / GIB)

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
        total = self.workload.flops * self.world_size
        return asdict(self) | {
            "needed_gib": self.needed,
            "fits": self.fits,
            "gpu_seconds_per_video": self.gpu_seconds_per_video,
            "processes_per_machine": self.processes_per_machine,
            "flops_per_update": total // self.workload.updates,
            "flops_per_video": total // self.videos,
        }


def make_plan(
    config: Config,
    *,
    world_size: int,
    gpu: Gpu | None,
    assumptions: Assumptions,
    peaks_of: PeaksOf | None = None,
) -> Plan:
    """Plan a run; prompts and weights need not be there. Without a `gpu`, time and fit are not predicted.

    `peaks_of` is that of `predict_memory`; `hyvideo.planning.simulation.simulate` simulates all blocks (minutes).

    Raises:
        ValueError: the configuration cannot run on that many ranks; the message says what can.
    """
    networks = read_networks(config.model, config.reward)
    check_plan(config, networks, world_size)
    parameters = count_parameters(policy_network(config, networks.transformer))
    work = workload(config, networks, parameters, world_size=world_size, num_text=assumptions.num_text)
    layout = layout_of(config, world_size)
    seconds_of = _clock(config, world_size, gpu, assumptions)
    saved = checkpoint_bytes(config, parameters)
    return Plan(
        world_size=world_size,
        sp_size=config.parallel.sp_size,
        dp_replicate=config.parallel.dp_replicate,
        videos=layout.num_videos,
        prompts=layout.num_groups,
        frames=config.rollout.sample_n_frames,
        size=config.rollout.rollout_size,
        networks=networks.source,
        unknown_rewards=networks.unknown_rewards,
        parameters=parameters,
        memory=predict_memory(
            config, networks, world_size=world_size, num_text=assumptions.num_text, peaks_of=peaks_of
        ),
        host=host_memory(config, networks, parameters, world_size=world_size, checkpoint_bytes=saved),
        workload=work,
        checkpoint_bytes=saved,
        seconds=seconds_of and {name: seconds_of(phase) for name, phase in work.phases.items()},
        validation_seconds=seconds_of(work.validation) if seconds_of and work.validation else None,
        gpu=gpu,
        assumptions=assumptions,
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
    heads = networks.transformer["num_attention_heads"]
    if heads % token_ranks(config):
        possible = (n for n in range(1, 2 * heads + 1) if world_size % n == 0)
        choices = [str(n) for n in possible if heads % (n // guidance_ranks(n, guided=guided)) == 0]
        raise ValueError(
            f"sp_size {config.parallel.sp_size} lets {token_ranks(config)} ranks share the {heads} attention heads, "
            f"which they do not divide: set it to one of {', '.join(choices)}."
        )


def checkpoint_bytes(config: Config, parameters: ParameterCounts) -> int:
    """Return the size of a checkpoint: trained weights, optimizer states, their average, the algorithm's copies."""
    matrices = parameters.trained_matrices if config.optimizer.use_muon else 0
    states = matrices + 2 * (parameters.trained - matrices)
    num_copies = algorithm_class(config.grpo.algorithm).num_copies(config) + (config.optimizer.ema_decay > 0)
    copies = parameters.trained * num_copies
    precision = "fp32" if config.model.use_lora else config.model.master_weight_type  # adapters are float32 always
    return DTYPES[precision].itemsize * (parameters.trained + states + copies)


def _clock(
    config: Config, world_size: int, gpu: Gpu | None, assumptions: Assumptions
) -> Callable[[PhaseWork], float] | None:
    """Return what predicts the time of a phase; None where the GPU's speed is not known."""
    if gpu is None or not gpu.teraflops:
        return None
    parallel = config.parallel
    shards = layout_of(config, world_size).num_shards if parallel.enable_fsdp else 1
    weights, copies, tokens = (  # bytes per second; within a machine where the group of ranks fits into one
        1e9 * (gpu.link if size <= assumptions.gpus_per_node else assumptions.network)
        for size in (shards, world_size, parallel.sp_size)
    )
    rate = gpu.teraflops * 1e12 * assumptions.utilisation

    def seconds(phase: PhaseWork) -> float:
        """Weights are sent during the computation, tokens between its parts."""
        sent = phase.traffic
        computing = max(phase.flops / rate, sent.weights / weights + sent.copies / copies)
        return computing + (sent.tokens + sent.condition) / tokens

    return seconds
