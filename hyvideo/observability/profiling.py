"""Profile mode: a PyTorch profiler trace and a table of where the time of some updates went."""

import os
import time
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hyvideo.observability.phase_timer import PHASES, RANGE

NUM_OPERATIONS = 15
"""Operations listed in the table."""


class Profile:
    """Profiles some updates: `trace_rank<R>.json.gz` of each rank (open it in Perfetto) and `phases.md` of rank 0.

    Recording begins with a round and ends after `num_updates` updates.

    Args:
        folder: made when the profile is written.
        rank: this process.
        num_updates: updates to cover.

    Example:
        >>> profile = Profile(run_folder / "profile", rank=0, num_updates=2)
        >>> profile.begin_round(last=False)  # the first round warms up
        >>> profile.begin_round(last=False)  # recording
        >>> profile.end_update()  # False, and after the second update True: both files are there
    """

    def __init__(self, folder: Path, *, rank: int, num_updates: int) -> None:
        self.folder = folder
        self._rank = rank
        self._num_updates = num_updates
        self._updates = 0
        self._rounds = 0
        self._profiler: profile | None = None
        self._start = 0.0

    def begin_round(self, *, last: bool) -> None:
        """Begin to record with the second round, or with the first if it is the `last`."""
        self._rounds += 1
        if not (self._rounds == 2 or (last and self._rounds == 1)):
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints when it starts and stops
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._start = time.perf_counter()

    def end_update(self) -> bool:
        """Count an update if recording, and finish after the last one; whether this was it."""
        if self._profiler is None:
            return False
        self._updates += 1
        if self._updates < self._num_updates:
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Write what was recorded; nothing when nothing is being recorded."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        seconds = time.perf_counter() - self._start
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / f"trace_rank{self._rank}.json.gz"))
        if self._rank == 0:
            text = phase_table(profiler, seconds, max(1, self._updates))
            (self.folder / "phases.md").write_text(text, encoding="utf-8")


def phase_table(profiler: profile, seconds: float, num_updates: int) -> str:
    """Write a finished profile as Markdown: the phases of `PhaseTimer`, then the most expensive operations.

    Args:
        profiler: stopped.
        seconds: wall-clock seconds it covers.
        num_updates: updates it covers.
    """
    averages = profiler.key_averages()
    ranges = {event.key: event for event in averages if event.device_type == DeviceType.CPU}
    on_gpu = torch.cuda.is_available()
    lines = [
        f"{seconds / num_updates:.3f} s per update over {num_updates} update(s), profiler running.\n",
        "| phase | seconds per update | share | GPU busy in it |",
        "|---|---|---|---|",
    ]
    elsewhere = seconds
    for phase in PHASES:
        event = ranges.get(RANGE + phase)
        inside = event.cpu_time_total / 1e6 if event else 0.0
        elsewhere -= inside
        busy = f"{event.device_time_total / 1e6 / inside:.0%}" if on_gpu and inside else "-"
        lines.append(f"| {phase} | {inside / num_updates:.3f} | {inside / seconds:.1%} | {busy} |")
    lines.append(f"| elsewhere | {elsewhere / num_updates:.3f} | {elsewhere / seconds:.1%} | - |\n")
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return "\n".join([*lines, "```", averages.table(sort_by=order, row_limit=NUM_OPERATIONS), "```", ""])
