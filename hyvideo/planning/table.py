"""A plan as a readable table."""

from collections.abc import Iterator

from hyvideo.distributed.layout import Layout
from hyvideo.planning.plan import GIB, Plan

Rows = Iterator[tuple[str, str]]


def plan_table(plan: Plan) -> str:
    """Return the plan as aligned lines, one number each."""
    sections = {
        "layout": _layout(plan),
        f"memory per GPU, GiB (networks: {plan.networks})": _memory(plan),
        f"host memory per machine, GiB ({plan.processes_per_machine} processes)": _host_memory(plan),
        "operations (1e15)": _operations(plan),
        "sent per rank and round, GB": _traffic(plan),
        "time": _time(plan),
    }
    lines = []
    for title, rows in sections.items():
        lines.append(title)
        lines += [f"  {name:<42}{value:>16}" for name, value in rows]
    return "\n".join(lines)


def _layout(plan: Plan) -> Rows:
    shards = Layout(plan.world_size, plan.sp_size, plan.dp_replicate).dp_shard
    yield "ranks = copies x shards x sp", f"{plan.world_size} = {plan.dp_replicate} x {shards} x {plan.sp_size}"
    yield "video", f"{plan.frames}x{plan.size}"
    yield "videos per round", str(plan.videos)
    yield "prompt groups per round", str(plan.prompts)
    yield "updates per round", str(plan.workload.updates)
    yield "checkpoint, GB", f"{plan.checkpoint_bytes / 1e9:.1f}"


def _memory(plan: Plan) -> Rows:
    memory = plan.memory
    parts = {
        "resident: transformer's shard": memory.weights,
        "resident: optimizer's shard": memory.optimizer,
        "resident: anchor's shard": memory.anchor,
        "resident: the weights' average, its shard": memory.ema,
        "resident: encoders and VAE": memory.frozen,
        "resident: reward networks": memory.reward_networks,
        "resident: a round's latents": memory.trajectory,
        "peak: rollout": memory.rollout,
        "peak: reward": memory.reward,
        "peak: anchor": memory.anchor_pass,
        "peak: update": memory.update,
        "peak: validation": memory.validation,
    }
    yield from ((name, f"{value / GIB:.2f}") for name, value in parts.items())
    yield f"needed (with {plan.reserved:.2f} in reserve)", f"{plan.needed:.2f}"
    if plan.gpu:
        yield f"{plan.gpu.name} has {plan.gpu.memory:g}", "fits" if plan.fits else "DOES NOT FIT"
    for name in plan.unknown_rewards:
        yield f"reward {name}: size unknown", "not counted"


def _host_memory(plan: Plan) -> Rows:
    yield "networks while loading", f"{plan.host.loading * plan.processes_per_machine / GIB:.1f}"
    yield "networks while training", f"{plan.host.training * plan.processes_per_machine / GIB:.1f}"


def _operations(plan: Plan) -> Rows:
    work, ranks = plan.workload, plan.world_size
    for name, phase in work.phases.items():
        yield f"{name}, per rank and round", f"{phase.flops / 1e15:.3g}"
    yield "all ranks, per update", f"{work.flops * ranks / work.updates / 1e15:.4g}"
    yield "per video, with its training", f"{work.flops * ranks / plan.videos / 1e15:.4g}"


def _traffic(plan: Plan) -> Rows:
    work = plan.workload
    for name, phase in work.phases.items():
        sent = phase.traffic
        yield f"{name}: weights", f"{(sent.weights + sent.copies) / 1e9:.1f}"
        yield f"{name}: tokens", f"{(sent.tokens + sent.condition) / 1e9:.1f}"


def _time(plan: Plan) -> Rows:
    if plan.seconds is None:
        yield "no GPU of known speed was named", "not predicted"
        return
    given = plan.assumptions
    yield f"at {given.utilisation:.0%} of {plan.gpu.teraflops:g} TFLOPS, {given.network:g} GB/s", ""
    yield from ((f"{name}, seconds per round", f"{value:.0f}") for name, value in plan.seconds.items())
    total = sum(plan.seconds.values())
    yield "seconds per update", f"{total / plan.workload.updates:.0f}"
    if plan.validation_seconds is not None:
        yield "seconds per validation, in addition", f"{plan.validation_seconds:.0f}"
    yield "GPU-seconds per video", f"{plan.gpu_seconds_per_video:.0f}"
