"""The plan of a run: its layout, memory, operations, bytes and time, read off a rehearsal, without its hardware.

And the search for settings that fit: other `sp_size`, and the least change to a run that does not.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, get_args

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.algorithms.weights_copy import starts_at_base
from hyvideo.config.schema import Config
from hyvideo.config.settings import SETTINGS, text_of, value_of
from hyvideo.distributed.gpus import Gpu
from hyvideo.distributed.mesh import Layout, guidance_ranks, layout_of
from hyvideo.models.parallelize import Recomputed
from hyvideo.planning.assumptions import Assumptions
from hyvideo.planning.networks import Networks, read_networks
from hyvideo.planning.rehearsal import PHASES, Rehearsal, rehearse
from hyvideo.training.checks import check_config

GIB = 2**30
TIMED = ("rollout", "anchor", "update")
"""Phases whose time is predicted; that of the reward's networks is not known."""

DISK = 2e9
"""Bytes of a checkpoint that all ranks together are assumed to write per second."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of networks in one process's host memory, the process itself and what it computes with left out.

    Attributes:
        loading: the most before the run begins; what belongs on the GPU is read there tensor by tensor, but reward
            networks and adapters are made here first (`hyvideo.training.build.open_run`).
        training: what stays: offloaded shards, anchor, rewards and encoders, and the copy that `async_save` keeps.
    """

    loading: float
    training: float


@dataclass(frozen=True)
class Plan:
    """What a run will need.

    Attributes:
        videos, prompts, updates: of a round over all ranks.
        frames, size: of a video, HEIGHTxWIDTH.
        checkpoints: that are on disk at most.
        networks: where the sizes of the networks are from.
        unknown_rewards: rewards counted as needing no memory.
        rehearsal: what one rank does in a round and in a validation, and what a GPU must hold.
        host: host memory of each process.
        leaving: bytes that a rank sends in a round in groups of ranks that no machine holds.
        seconds: predicted time of a round by phase; None without a GPU's speed.
        validation_seconds: predicted time of one validation; None without a GPU's speed, or without validation.
        hours: predicted time of the whole run, `max_steps` updates long, by what takes it; None without `seconds`.
        max_steps: updates of the whole run.
        gpu: what was planned for; None: no GPU in particular.
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
    leaving: float
    seconds: dict[str, float] | None
    validation_seconds: float | None
    hours: dict[str, float] | None
    max_steps: int
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

    @property
    def whole_run(self) -> str:
        """Say what the whole run takes and costs; empty where its time is not predicted."""
        if self.hours is None:
            return ""
        hours, price = sum(self.hours.values()), self.assumptions.price_per_gpu_hour
        costs = "" if price is None else f", {hours * self.world_size * price:,.0f} at {price:g} per GPU-hour"
        return f"{self.max_steps:,} updates: {hours:,.1f} hours, {hours * self.world_size:,.0f} GPU-hours{costs}"

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

    With `whole` every block and step is rehearsed, which takes minutes. A ValueError says why it cannot run.
    """
    networks = read_networks(config.model, config.reward)
    check_plan(config, networks, world_size)
    done = rehearse(config, networks, world_size=world_size, num_text=assumptions.num_text, whole=whole)
    layout, seconds_of = layout_of(config, world_size), _clock(config, world_size, gpu, assumptions)
    validated = "validation" in done.flops
    seconds = seconds_of and {phase: seconds_of(done, phase) for phase in TIMED}
    validation = seconds_of(done, "validation") if seconds_of and validated else None
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
        leaving=sum(
            done.sent_in(phase, whose)
            for whose, size in _groups(config, world_size).items()
            for phase in TIMED
            if size > assumptions.gpus_per_node
        ),
        seconds=seconds,
        validation_seconds=validation,
        hours=seconds and _hours(config, sum(seconds.values()), validation or 0.0, done.sizes["checkpoint"]),
        max_steps=config.run.max_steps,
        gpu=gpu,
        assumptions=assumptions,
    )


def plan_table(plan: Plan) -> str:
    """Return the plan as aligned lines, one number each."""
    done, gpu, machine = plan.rehearsal, plan.gpu, plan.processes_per_machine / GIB
    total = plan.flops * plan.world_size / 1e15
    shards = Layout(plan.world_size, plan.sp_size, plan.dp_replicate).dp_shard
    layout = {
        "ranks = copies x shards x sp": f"{plan.world_size} = {plan.dp_replicate} x {shards} x {plan.sp_size}",
        "video": f"{plan.frames}x{plan.size}",
        "videos per round": plan.videos,
        "prompt groups per round": plan.prompts,
        "updates per round": plan.updates,
        "checkpoint, GB": f"{plan.checkpoint_bytes / 1e9:.1f}",
        f"the {plan.checkpoints} that are kept at most, GB": f"{plan.checkpoints * plan.checkpoint_bytes / 1e9:,.0f}",
    }
    memory = {f"resident: {name}": f"{held / GIB:.2f}" for name, held in done.resident.items()}
    memory |= {f"peak: {phase}": f"{done.peaks[phase] / GIB:.2f}" for phase in PHASES if phase in done.peaks}
    memory[f"needed (with {plan.reserved:.2f} in reserve)"] = f"{plan.needed:.2f}"
    if gpu:
        memory[f"{gpu.name} has {gpu.memory:g}"] = "fits" if plan.fits else "DOES NOT FIT"
    memory |= {f"reward {name}: size unknown": "not counted" for name in plan.unknown_rewards}
    operations = {f"{phase}, per rank and round": f"{done.flops.get(phase, 0) / 1e15:.3g}" for phase in TIMED}
    operations |= {"all ranks, per update": f"{total / plan.updates:.4g}"}
    operations |= {"per video, with its training": f"{total / plan.videos:.4g}"}
    sent = {}
    for phase in TIMED:
        weights = done.sent_in(phase, "weights") + done.sent_in(phase, "copies")
        sent |= {f"{phase}: weights": f"{weights / 1e9:.1f}"}
        sent |= {f"{phase}: tokens": f"{done.sent_in(phase, 'tokens') / 1e9:.1f}"}
    sent["of it among more ranks than a machine has"] = f"{plan.leaving / 1e9:.1f}"
    time = {"no GPU of known speed was named": "not predicted"}
    if plan.seconds is not None:
        given = plan.assumptions
        time = {f"at {given.utilisation:.0%} of {gpu.teraflops:g} TFLOPS, {gpu.link:g} and {given.network:g} GB/s": ""}
        time |= {f"{name}, seconds per round": f"{value:.0f}" for name, value in plan.seconds.items()}
        time["seconds per update"] = f"{sum(plan.seconds.values()) / plan.updates:.0f}"
        if plan.validation_seconds is not None:
            time["seconds per validation, in addition"] = f"{plan.validation_seconds:.0f}"
        time["GPU-seconds per video"] = f"{plan.gpu_seconds_per_video:.0f}"
        time |= {f"whole run, hours: {name}": f"{value:,.2f}" for name, value in plan.hours.items()}
    sections = {
        "layout": layout,
        f"memory per GPU, GiB (networks: {plan.networks})": memory,
        f"host memory per machine, GiB ({plan.processes_per_machine} processes)": {
            "networks while loading": f"{plan.host.loading * machine:.1f}",
            "networks while training": f"{plan.host.training * machine:.1f}",
        },
        "operations (1e15)": operations,
        "sent per rank and round, GB": sent,
        "time": time,
    }
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:<42}{value:>16}" for name, value in rows.items())]
    return "\n".join(lines)


def misfit(plan: Plan) -> str:
    """Say that a plan does not fit."""
    return (
        f"the run needs {plan.needed:.1f} GiB per GPU ({plan.reserved:.1f} of them in reserve), but "
        f"{plan.gpu.name} has {plan.gpu.memory:g}."
    )


def check_plan(config: Config, networks: Networks, world_size: int) -> None:
    """Refuse, by a ValueError, a layout that cannot run."""
    vae, guided = networks.vae, config.rollout.is_guided
    check_config(config, world_size, vae["spatial_compression_ratio"], vae["temporal_compression_ratio"], files=False)
    heads, sp_size = networks.transformer["num_attention_heads"], config.parallel.sp_size
    sharing = sp_size // guidance_ranks(sp_size, guided=guided)  # ranks that share the tokens of a row
    if heads % sharing:
        possible = (n for n in range(1, 2 * heads + 1) if world_size % n == 0)
        choices = [str(n) for n in possible if heads % (n // guidance_ranks(n, guided=guided)) == 0]
        raise ValueError(
            f"sp_size {sp_size} lets {sharing} ranks share the {heads} attention heads, "
            f"which they do not divide: set it to one of {', '.join(choices)}."
        )


def _hours(
    config: Config, round_seconds: float, validation_seconds: float, checkpoint_bytes: float
) -> dict[str, float]:
    """Return the hours of the whole run, the reward's networks left out.

    Checkpoints that are written beside the training delay it once, at the end.
    """
    run, validation = config.run, config.validation
    rounds = math.ceil(run.max_steps / config.grpo.updates_per_rollout)
    validations = validation.validate_at_step0 + (
        run.max_steps // validation.validation_interval if validation.validation_interval else 0
    )
    saves = math.ceil(run.max_steps / run.save_interval) if run.save_interval and not run.async_save else 1
    seconds = {
        "training": rounds * round_seconds,
        f"{validations} validations": validations * validation_seconds,
        f"{saves} checkpoints waited for": saves * checkpoint_bytes / DISK,
    }
    return {name: value / 3600 for name, value in seconds.items()}


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


def _groups(config: Config, world_size: int) -> dict[str, int]:
    """Return how many ranks exchange weights, whole copies' gradients, and tokens with each other."""
    shards = layout_of(config, world_size).num_shards if config.parallel.enable_fsdp else 1
    return {"weights": shards, "copies": world_size, "tokens": config.parallel.sp_size}


def _clock(
    config: Config, world_size: int, gpu: Gpu | None, assumptions: Assumptions
) -> Callable[[Rehearsal, str], float] | None:
    """Return what predicts the time of a phase; None where the GPU's speed is not known."""
    if gpu is None or not gpu.teraflops:
        return None
    links = {  # bytes per second; within a machine where the group of ranks fits into one
        whose: 1e9 * (gpu.link if size <= assumptions.gpus_per_node else assumptions.network)
        for whose, size in _groups(config, world_size).items()
    }
    rate = gpu.teraflops * 1e12 * assumptions.utilisation

    def seconds(done: Rehearsal, phase: str) -> float:
        """Weights are sent during the computation, tokens between its parts."""
        sending = {whose: done.sent_in(phase, whose) / link for whose, link in links.items()}
        return max(done.flops.get(phase, 0) / rate, sending["weights"] + sending["copies"]) + sending["tokens"]

    return seconds


@dataclass(frozen=True)
class Search:
    """Plans variations of one configuration on one kind of GPU; `tell` is called with a line for each plan."""

    config: Config
    world_size: int
    gpu: Gpu
    assumptions: Assumptions
    tell: Callable[[str], None]

    def plan(self, changes: Mapping[str, Any]) -> Plan | None:
        """Plan the run with some settings changed; None where it cannot run with them."""
        config, said = with_settings(self.config, changes), flags_of(changes)
        try:
            plan = make_plan(config, world_size=self.world_size, gpu=self.gpu, assumptions=self.assumptions)
        except ValueError:
            self.tell(f"{said}: cannot run")
            return None
        self.tell(f"{said}: {plan.needed:.1f} GiB, {'fits' if plan.fits else 'does not fit'}")
        return plan

    def sp_sizes(self) -> list[Plan]:
        """Return the plans of all possible `sp_size`, each with about the configuration's videos per round."""
        tried = (self.plan(self._sp_changes(size)) for size in range(1, self.assumptions.gpus_per_node + 1))
        return [plan for plan in tried if plan]

    def nearest_that_fits(self) -> tuple[dict[str, Any], float] | None:
        """Return the changes that make the run fit at the least cost, and the GiB it then needs; None if none do.

        Changes are added one by one, from harmless to costly: recomputation and smaller batches, idle weights moved off
        the GPU, more ranks per video, shorter videos. Validation videos become as large as the rollout's where they
        take most.
        """
        changes: dict[str, Any] = {}
        for more in self._remedies():
            plan = self.plan(changes | more)
            if plan is None:
                continue
            changes |= more
            if not plan.fits and plan.rehearsal.peaks.get("validation") == plan.rehearsal.peak:
                rollout = with_settings(self.config, changes).rollout
                changes |= {"validation_fixed_size": rollout.rollout_size}
                changes |= {"validate_video_length": rollout.sample_n_frames}
                plan = self.plan(changes)
            if plan.fits:
                return changes, plan.needed
        return None

    def _remedies(self) -> Iterator[dict[str, Any]]:
        config = self.config
        levels, recomputed = ("none", *get_args(Recomputed)[::-1]), config.parallel.activation_checkpointing
        wanted = [
            ("enable_fsdp", self.world_size > 1 or config.parallel.enable_fsdp),
            *(("activation_checkpointing", level) for level in levels[levels.index(recomputed) :]),
            ("reshard_after_forward", True),
            ("mini_batch_size_per_update", 1),
            ("rollout_micro_batch_size", 1),
        ]
        resting = config.parallel.offload
        for word in ("anchor", "reward", "encoders"):
            resting = resting + [word] * (word not in resting)
            wanted.append(("offload", resting))
        if self.world_size == 1:  # more GPUs would rather hold a part of the weights each
            wanted += [("enable_fsdp", True), ("offload", resting + ["weights"] * ("weights" not in resting))]
        yield from ({name: value} for name, value in wanted if value_of(config, name) != value)
        for sp_size in range(config.parallel.sp_size + 1, self.assumptions.gpus_per_node + 1):
            yield self._sp_changes(sp_size)
        for frames in range((config.rollout.sample_n_frames - 2) // 20 * 20 + 1, 20, -20):  # multiples of 20, and 1
            yield {"sample_n_frames": frames}

    def _sp_changes(self, sp_size: int) -> dict[str, Any]:
        """Return an `sp_size` with the `batch_size` that keeps the videos of a round, or makes them a few more."""
        grpo, videos = self.config.grpo, layout_of(self.config, self.world_size).num_videos
        rollouts, ranks = grpo.gradient_accumulation_steps, max(1, self.world_size // sp_size)
        batch, group = math.ceil(videos / rollouts / ranks), grpo.num_generations
        while not (batch % group == 0 or group % batch == 0) or batch * ranks % group:
            batch += 1
        return {"sp_size": sp_size, "batch_size": batch, "dp_replicate": 1}


def flags_of(changes: Mapping[str, Any]) -> str:
    """Return changed settings as one would type them."""
    return " ".join(f"--{name} {text_of(value)}" for name, value in changes.items())


def with_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of the configuration with some settings changed."""
    changed = deepcopy(config)
    for name, value in changes.items():
        setattr(getattr(changed, SETTINGS[name].group), name, value)
    return changed
