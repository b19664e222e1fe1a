"""A plan as a readable table."""

from collections.abc import Iterator

from hyvideo.distributed.layout import Layout
from hyvideo.planning.plan import GIB, TIMED, Plan
from hyvideo.planning.rehearsal import PHASES

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
    yield "updates per round", str(plan.updates)
    yield "checkpoint, GB", f"{plan.checkpoint_bytes / 1e9:.1f}"
    yield f"the {plan.checkpoints} that are kept at most, GB", f"{plan.checkpoints * plan.checkpoint_bytes / 1e9:,.0f}"


def _memory(plan: Plan) -> Rows:
    yield from ((f"resident: {name}", f"{held / GIB:.2f}") for name, held in plan.rehearsal.resident.items())
    peaks = plan.rehearsal.peaks
    yield from ((f"peak: {phase}", f"{peaks[phase] / GIB:.2f}") for phase in PHASES if phase in peaks)
    yield f"needed (with {plan.reserved:.2f} in reserve)", f"{plan.needed:.2f}"
    if plan.gpu:
        yield f"{plan.gpu.name} has {plan.gpu.memory:g}", "fits" if plan.fits else "DOES NOT FIT"
    for name in plan.unknown_rewards:
        yield f"reward {name}: size unknown", "not counted"


def _host_memory(plan: Plan) -> Rows:
    yield "networks while loading", f"{plan.host.loading * plan.processes_per_machine / GIB:.1f}"
    yield "networks while training", f"{plan.host.training * plan.processes_per_machine / GIB:.1f}"


def _operations(plan: Plan) -> Rows:
    for phase in TIMED:
        yield f"{phase}, per rank and round", f"{plan.rehearsal.flops.get(phase, 0) / 1e15:.3g}"
    yield "all ranks, per update", f"{plan.flops * plan.world_size / plan.updates / 1e15:.4g}"
    yield "per video, with its training", f"{plan.flops * plan.world_size / plan.videos / 1e15:.4g}"


def _traffic(plan: Plan) -> Rows:
    done = plan.rehearsal
    for phase in TIMED:
        yield f"{phase}: weights", f"{(done.sent_in(phase, 'weights') + done.sent_in(phase, 'copies')) / 1e9:.1f}"
        yield f"{phase}: tokens", f"{done.sent_in(phase, 'tokens') / 1e9:.1f}"


def _time(plan: Plan) -> Rows:
    if plan.seconds is None:
        yield "no GPU of known speed was named", "not predicted"
        return
    given = plan.assumptions
    yield f"at {given.utilisation:.0%} of {plan.gpu.teraflops:g} TFLOPS, {given.network:g} GB/s", ""
    yield from ((f"{name}, seconds per round", f"{value:.0f}") for name, value in plan.seconds.items())
    total = sum(plan.seconds.values())
    yield "seconds per update", f"{total / plan.updates:.0f}"
    if plan.validation_seconds is not None:
        yield "seconds per validation, in addition", f"{plan.validation_seconds:.0f}"
    yield "GPU-seconds per video", f"{plan.gpu_seconds_per_video:.0f}"
