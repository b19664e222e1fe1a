"""Profile mode: a trace of the beginning of each phase, and a table of where the time went; and the device's peak."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from hyvideo.distributed.gpus import named_by_driver
from hyvideo.observability.phase_timer import PHASES, PhaseTimer, clock

PASSES = 2
"""Passes through the transformer that are recorded of a phase: one of the released model has some 100,000 events."""

NUM_OPERATIONS = 15
"""Operations listed for each phase."""


Recorded = tuple[profile, float]
"""The beginning of a phase: a profiler that has stopped, and the seconds that it covers."""


class Profile:
    """Profiles a round: `trace_rank<R>_<phase>.json.gz` of each rank (open it in Perfetto) and `phases.md` of rank 0.

    The second round is profiled, or the first if it is the last one, and as many whole rounds after it as the updates
    need: what a round's updates share is timed with its first one. Of each phase the profiler sees the first `PASSES`
    passes through the transformer with all that is around them; the seconds of whole phases are the timer's, of at
    least `num_updates` updates.
    """

    def __init__(
        self, folder: Path, *, rank: int, timer: PhaseTimer, transformer: nn.Module, num_updates: int = 2
    ) -> None:
        self.folder = folder
        self._rank = rank
        self._num_updates = num_updates
        self._times: list[Mapping[str, float]] = []
        self._device = timer.device
        self._rounds = 0
        self._is_open = False
        self._running: profile | None = None
        self._phase, self._start, self._passes = "", 0.0, 0
        self._recorded: dict[str, Recorded] = {}
        timer.around = self._record
        transformer.register_forward_pre_hook(lambda module, args: self._begin_pass())

    def begin_round(self, *, last: bool) -> None:
        """Begin with the second round, or with the first if it is the `last`."""
        self._rounds += 1
        self._is_open = self._is_open or self._rounds == 2 or (last and self._rounds == 1)

    def end_update(self, times: Mapping[str, float], *, round_ends: bool) -> bool:
        """Take an update's seconds (`PhaseTimer.pop`), and finish with the round of the last one; whether it did."""
        if not self._is_open:
            return False
        self._times.append(times)
        if not round_ends or len(self._times) < self._num_updates:
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Write what was recorded; nothing when nothing is being recorded."""
        if not self._is_open:
            return
        self._is_open = False
        self.folder.mkdir(parents=True, exist_ok=True)
        for phase, (profiler, _) in self._recorded.items():
            profiler.export_chrome_trace(str(self.folder / f"trace_rank{self._rank}_{phase}.json.gz"))
        if self._rank == 0:
            (self.folder / "phases.md").write_text(phase_table(self._recorded, self._times), encoding="utf-8")
        self._recorded.clear()

    @contextmanager
    def _record(self, phase: str) -> Iterator[None]:
        """Record the beginning of a phase, unless that was done before."""
        if not self._is_open or phase in self._recorded:
            yield
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints when it starts and stops
        self._phase, self._start, self._passes = phase, clock(self._device), 0
        self._running = profile(activities=activities)
        self._running.start()
        try:
            with record_function(f"phase/{phase}"):
                yield
        finally:
            self._stop()

    def _begin_pass(self) -> None:
        """Count a pass; stop before the one that is too many."""
        if self._passes == PASSES:
            self._stop()
        self._passes += 1

    def _stop(self) -> None:
        if self._running is not None:
            seconds = clock(self._device) - self._start
            self._running.stop()
            self._recorded[self._phase] = self._running, seconds
            self._running = None


def phase_table(recorded: Mapping[str, Recorded], times: Sequence[Mapping[str, float]]) -> str:
    """Write a profile as Markdown: the seconds of the phases, then the most expensive operations of each."""
    count = max(1, len(times))
    seconds = {phase: sum(of_update[f"time/{phase}"] for of_update in times) / count for phase in PHASES}
    whole = sum(seconds.values()) or 1.0
    lines = [
        f"{sum(seconds.values()):.3f} s per update over {len(times)} update(s), besides validation and saving.\n",
        "| phase | seconds per update | share | GPU busy at its beginning |",
        "|---|---|---|---|",
    ]
    for phase in PHASES:
        busy = "-"
        if phase in recorded and torch.cuda.is_available():  # at least one kernel, whichever thread had started it
            profiler, covers = recorded[phase]
            events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
            busy = f"{covered([(e.time_range.start, e.time_range.end) for e in events]) / 1e6 / covers:.0%}"
        lines.append(f"| {phase} | {seconds[phase]:.3f} | {seconds[phase] / whole:.1%} | {busy} |")
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    for phase, (profiler, covers) in recorded.items():
        operations = profiler.key_averages().table(sort_by=order, row_limit=NUM_OPERATIONS)
        lines += [
            f"\n## {phase}: the first {PASSES} passes, {covers:.3f} s with the profiler running\n",
            *("```", operations, "```"),
        ]
    return "\n".join([*lines, ""])


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of what intervals (start, end) cover together."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def matrix_peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the 10^12 operations per second that `device` can make in matrix products of `dtype`.

    That is the data sheet's figure of a known GPU in half precision, otherwise what a large product reaches now: the
    fastest of five counts, after one that does not.
    """
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        known = named_by_driver(torch.cuda.get_device_name(device))
        if known is not None:
            return known.teraflops
    size = 8192 if device.type == "cuda" else 1024
    generator = torch.Generator(device).manual_seed(0)  # not the global one, whose state is the run's
    first, second = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(6):
        start = clock(device)
        first @ second
        seconds.append(clock(device) - start)
    return 2 * size**3 / min(seconds[1:]) / 1e12
