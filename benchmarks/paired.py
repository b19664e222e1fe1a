"""Two ways of doing the same, timed in turns in one process: neighbours meet the same load, so their ratio holds."""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from hyvideo.observability.phase_timer import clock


@dataclass(frozen=True)
class Spread:
    """A ratio baseline / ours: above 1, ours is faster.

    `low` and `high` are the first and the third quartile, or of fewer than four pairs the lowest and the highest.
    """

    median: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Spread":
        """Summarise the ratios of several pairs."""
        low, high = min(ratios), max(ratios)
        if len(ratios) >= 4:
            low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(statistics.median(ratios), low, high, len(ratios))


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        name: `<benchmark>/<case>`; with it a later run is compared.
        compares: baseline and ours in words.
        ratio: of their times.
        facts: further numbers by name, such as seconds, bytes or errors.
    """

    name: str
    compares: str
    ratio: Spread
    facts: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict:
        """Return what is written to the results file, numbers to four digits."""
        entry = asdict(self)
        del entry["name"]
        for part in ("ratio", "facts"):
            entry[part] = {name: _rounded(value) for name, value in entry[part].items()}
        return entry


def compare(
    name: str,
    compares: str,
    baseline: Callable[[], object],
    ours: Callable[[], object],
    *,
    pairs: int = 7,
    settle: Callable[[], object] = lambda: None,
    facts: Mapping[str, float] | None = None,
) -> Result:
    """Run both in turns, after once each to warm up; the order alternates from pair to pair.

    `settle` is called after every run, not timed. `facts` are further numbers for the result, besides the median
    seconds of both.
    """
    for run in (baseline, ours):
        run()
        settle()
    seconds: dict[Callable, list[float]] = {baseline: [], ours: []}
    for number in range(pairs):
        for run in (baseline, ours) if number % 2 else (ours, baseline):
            start = now()
            run()
            seconds[run].append(now() - start)
            settle()
    ratio = Spread.of([a / b for a, b in zip(seconds[baseline], seconds[ours], strict=True)])
    medians = {"baseline_seconds": seconds[baseline], "ours_seconds": seconds[ours]}
    return Result(name, compares, ratio, {k: statistics.median(v) for k, v in medians.items()} | dict(facts or {}))


_shared = False


def on_shared_cpu() -> None:
    """From now on measure the CPU seconds of one thread instead of time: other users of the CPU hardly matter."""
    global _shared
    _shared = True
    torch.set_num_threads(1)


def now() -> float:
    """Return the clock, on a GPU after synchronising with it."""
    return time.process_time() if _shared else clock(device())


def median_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Return the median time of several runs, after one to warm up."""
    seconds = []
    for _ in range(1 + repeats):
        start = now()
        run()
        seconds.append(now() - start)
    return statistics.median(seconds[1:])


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most memory that `run` held at any time beyond what was held before it.

    On a GPU the allocator knows; on a CPU it is added up from the profiler's record of every allocation.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def machine_kind() -> str:
    """Return what results may be compared with: a GPU's name, the number of CPU cores, or one thread if shared."""
    if _shared:
        return "cpu-1-thread"
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"cpu-{os.cpu_count()}-cores"


def device() -> torch.device:
    """Return where benchmarks run: the GPU when there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def print_results(results: Sequence[Result]) -> None:
    """Print one line per result."""
    for result in results:
        ratio = f"{result.ratio.median:.2f}x [{result.ratio.low:.2f}, {result.ratio.high:.2f}]"
        facts = ", ".join(f"{name} {_rounded(value):g}" for name, value in result.facts.items())
        print(f"{result.name}: {ratio} ({result.compares}); {facts}", flush=True)


def _rounded(value: float) -> float:
    """Round to four significant digits; whole numbers stay."""
    if isinstance(value, int) or not math.isfinite(value) or value == 0:
        return value
    return round(value, 3 - math.floor(math.log10(abs(value))))
