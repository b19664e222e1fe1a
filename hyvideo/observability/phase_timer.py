"""Where a step's seconds go: rollout, reward, anchor, update; and where a rank is stuck."""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

import torch

PHASES = ("rollout", "reward", "anchor", "update")
BETWEEN = "between phases (validation, saving, logging)"


class PhaseTimer:
    """Adds up wall-clock seconds per phase; on a GPU it waits for the device, so a phase pays for its own kernels.

    `phase` names what is going on (`BETWEEN` outside all blocks), `since` when that began (`time.monotonic`): what a
    watchdog or an error message asks for. `around` makes a context for each phase, which a profiler replaces.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.around: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.phase = BETWEEN
        self.since = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the duration of the `with` block to `phase`; where it fails, `self.phase` goes on naming it."""
        self.phase, self.since = phase, time.monotonic()
        start = clock(self.device)
        with self.around(phase):
            try:
                yield
            finally:
                self._seconds[phase] += clock(self.device) - start
        self.phase, self.since = BETWEEN, time.monotonic()

    def pop(self) -> dict[str, float]:
        """Seconds per phase since the last pop, as `{"time/<phase>": seconds}` for every phase; starts again at 0."""
        seconds = {f"time/{phase}": value for phase, value in self._seconds.items()}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return seconds


def clock(device: torch.device) -> float:
    """Return the seconds of a clock when `device` has finished what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


class Watchdog:
    """Says where a rank is stuck while it is stuck, from a thread of its own: its phase, and what its threads do.

    Every rank has one. A rank that waits for others in a collective is stuck as well: the culprit is the one whose
    stack is not in a collective, or that is silent (stopped or dead). It prints after `seconds` in one phase, and again
    after as many. The output must be a real file, because stacks are written to its descriptor.
    """

    def __init__(self, timer: PhaseTimer, *, rank: int, seconds: float, output: TextIO | None = None) -> None:
        self._timer = timer
        self._rank = rank
        self._seconds = seconds
        self._output = output or sys.stderr
        self._ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        """Start to watch."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        since, told = self._timer.since, 0
        while not self._ended.wait(min(self._seconds / 4, 10.0)):
            if self._timer.since != since:
                since, told = self._timer.since, 0
            waited = time.monotonic() - since
            if waited >= self._seconds * (told + 1):
                told += 1
                print(
                    f"WARNING: rank {self._rank}: {waited:.0f} s in phase '{self._timer.phase}'; stacks of its "
                    "threads, the innermost call first:",
                    file=self._output,
                    flush=True,
                )
                faulthandler.dump_traceback(self._output, all_threads=True)
