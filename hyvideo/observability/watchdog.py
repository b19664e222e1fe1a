"""Reports where a rank is stuck while it is stuck: its phase, and what each of its threads is doing."""

import faulthandler
import sys
import threading
import time
from typing import TextIO

from hyvideo.observability.phase_timer import PhaseTimer


class Watchdog:
    """Watches one rank from a thread of its own; every rank has one, so a stuck run shows where each of them waits.

    A rank that waits for others in a collective is stuck as well: the culprit is the one whose stack is not in a
    collective, or that is silent (stopped or dead).

    It prints after `seconds` in one phase, and again after as many. The output must be a real file, because stacks are
    written to its descriptor.

    Example:
        >>> with Watchdog(timer, rank=3, seconds=900):
        ...     train()  # rank 3: 900 s in phase 'reward', and the stacks, once a reward takes so long
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
                self._print(waited)

    def _print(self, waited: float) -> None:
        """Print the phase and all stacks, among them the one that holds up the run."""
        print(
            f"WARNING: rank {self._rank}: {waited:.0f} s in phase '{self._timer.phase}'; stacks of its threads, the "
            "innermost call first:",
            file=self._output,
            flush=True,
        )
        faulthandler.dump_traceback(self._output, all_threads=True)
