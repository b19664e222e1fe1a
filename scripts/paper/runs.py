"""Many trainings: those that are missing are trained, several at a time, and may stop at any time."""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from hyvideo.training.stop_signal import PREEMPTED, StopSignal

if TYPE_CHECKING:
    from scripts.paper.reproduce import PaperRun

REPOSITORY = Path(__file__).parents[2]
_LOOK_EVERY_SECONDS = 0.5


class _Training:
    """A run in a process of its own, which holds the run's lock while it lives."""

    def __init__(self, run: "PaperRun", lock: TextIOWrapper, threads: int | None) -> None:
        self.run, self._lock = run, lock
        self._environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        self._start(run.commands())

    def _start(self, left: list[list[str]]) -> None:
        self._num_left = len(left)
        self.process = subprocess.Popen(
            left[0],
            stdout=self._lock,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=REPOSITORY,
            start_new_session=True,  # Ctrl-C reaches this program, which asks its trainings to stop once
        )

    def is_over(self, *, asked_to_stop: bool) -> bool:
        """Whether its last command has ended, or one did not do all its work; starts the next command otherwise."""
        if (status := self.process.poll()) is None:
            return False
        if status == 0 and not asked_to_stop and 0 < len(left := self.run.commands()) < self._num_left:
            self._start(left)
            return False
        return True

    def stop(self) -> None:
        """Let a training save and stop; a measurement ends at once, with the programs that it started."""
        with suppress(ProcessLookupError):
            if self._num_left > 1:
                self.process.send_signal(signal.SIGTERM)
            else:
                os.killpg(self.process.pid, signal.SIGTERM)

    def close(self, *, asked_to_stop: bool) -> str | None:
        """Wait for the end and tidy up; returns what went wrong, if anything did.

        One that is asked to stop while it is starting up dies of the signal, which is not a failure.
        """
        status = self.process.wait()
        self._lock.close()
        if self.run.is_finished:
            self.run.tidy()
            return None
        if asked_to_stop and status in (0, -signal.SIGTERM, PREEMPTED):
            return None
        ended = f"status {status}" if status else "it ended before its work was done"
        return f"{ended}, see {log_of(self.run)}"


def log_of(run: "PaperRun") -> Path:
    """Where a run's console goes."""
    return run.folder.with_suffix(".log")


def train(runs: "Sequence[PaperRun]", *, jobs: int, minutes: float | None = None, threads: int | None = 1) -> list[str]:
    """Train what is not finished, in the order given.

    Ctrl-C, SIGTERM and the end of `minutes` let every training finish its round, save and stop. A run that another
    command is training right now is left to it.

    Args:
        runs: what is wanted; those that are finished are skipped.
        jobs: trainings at a time.
        minutes: how long to go on; None to the end.
        threads: of each process on the CPU; None leaves it to the command.

    Returns:
        What went wrong, one line per failed run.
    """
    waiting = [run for run in {run.folder: run for run in runs}.values() if not run.is_finished]
    active: list[_Training] = []
    failures = []
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    if waiting and minutes != 0:
        print(f"{len(waiting)} of {len(runs)} runs to train, {jobs} at a time", flush=True)
    with StopSignal().listening() as stop:
        try:
            while active or waiting:
                if _is_over(stop, deadline):
                    waiting.clear()
                    _ask_to_stop(active)
                while waiting and len(active) < jobs:
                    active += _start(waiting.pop(0), threads)
                over = _is_over(stop, deadline)
                for training in [training for training in active if training.is_over(asked_to_stop=over)]:
                    active.remove(training)
                    failure = training.close(asked_to_stop=over)
                    failures += [f"{training.run.folder.name}: {failure}"] if failure else []
                    state = "failed" if failure else "finished" if training.run.is_finished else "stopped"
                    print(f"{state}: {training.run.folder.name}; {len(waiting) + len(active)} to go", flush=True)
                time.sleep(_LOOK_EVERY_SECONDS)
        finally:
            _ask_to_stop(active)  # none is left, unless one could not be started
    return failures


def _is_over(stop: StopSignal, deadline: float) -> bool:
    return stop.name is not None or time.monotonic() > deadline


def _start(run: "PaperRun", threads: int | None) -> list[_Training]:
    """Start a training; none when another command holds it."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = log_of(run).open("a", encoding="utf-8")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not run.is_finished:  # another command may have finished it since
            return [_Training(run, log, threads)]
    except BlockingIOError:
        print(f"left to the command that is at it: {run.folder.name}", flush=True)
    log.close()
    return []


def _ask_to_stop(active: list[_Training]) -> None:
    """Stop all, and wait for them."""
    for training in active:
        training.stop()
    for training in active:
        training.process.wait()
