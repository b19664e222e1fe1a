"""The entry files run as commands, in processes of their own, without paying their seconds of imports each time.

A fork of the server (`tests.support.ranks`), which has imported the entry files, runs one as `__main__`, with its own
arguments, working directory and output.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.support.ranks import forking_context
from tests.support.training import REPOSITORY

TIMEOUT = 600.0
"""Seconds after which a command that should have ended is a failed test."""


@dataclass(frozen=True)
class Finished:
    """A command that ended: its exit status (negative for a signal) and what it wrote."""

    status: int
    stdout: str
    stderr: str


class Command:
    """A running command; `wait` for it, or `signal_when` something has happened."""

    def __init__(self, process: multiprocessing.Process, outputs: Path) -> None:
        self._process = process
        self._outputs = outputs

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def signal_when(self, number: signal.Signals, happened: Callable[[], bool]) -> None:
        """Send a signal as soon as `happened()`; an error if the command ends before."""
        deadline = time.monotonic() + TIMEOUT
        while not happened():
            assert self._process.is_alive(), f"the command ended too early: {self.wait()}"
            assert time.monotonic() < deadline, "what the test waits for did not happen"
            time.sleep(0.01)
        self.signal(number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self._process.pid, number)

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def status(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it without a chance to tidy up."""
        self._process.kill()

    def wait(self) -> Finished:
        """Wait for the end."""
        self._process.join(TIMEOUT)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError(f"no end after {TIMEOUT} s: {self.read('stderr')[-2000:]}")
        return Finished(self._process.exitcode, self.read("stdout"), self.read("stderr"))

    def read(self, name: str) -> str:
        """Return what it wrote so far to `stdout` or `stderr`."""
        path = self._outputs / name
        return path.read_text() if path.exists() else ""


class CommandLine:
    """Starts commands in `folder`, which is empty at first.

    Args:
        folder: their working directory.
        outputs: receives what they write to stdout and stderr, one folder each.
    """

    def __init__(self, folder: Path, outputs: Path) -> None:
        self.folder = folder
        self._outputs = outputs
        self._context = forking_context()

    def start(self, script: str, argv: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> Command:
        """Start `python script argv...`, with `environment` added to this process's."""
        outputs = self._outputs / str(len(list(self._outputs.iterdir())))
        outputs.mkdir()
        process = self._context.Process(
            target=_run, args=(script, list(argv), dict(environment), str(self.folder), str(outputs))
        )
        process.start()
        return Command(process, outputs)

    def run(self, script: str, argv: Sequence[str]) -> Finished:
        """Run `python script argv...` to its end."""
        return self.start(script, argv).wait()

    def call(self, command: Sequence[str]) -> int:
        """Stand in for `subprocess.call` of `[python, script, argv...]`; its stderr comes out of this process's."""
        finished = self.run(command[1], command[2:])
        print(finished.stderr, end="", file=sys.stderr)
        return finished.status


def _run(script: str, argv: list[str], environment: dict[str, str], folder: str, outputs: str) -> None:
    """Be the command: in the forked process."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(os.path.join(outputs, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    os.environ |= environment
    os.chdir(folder)
    sys.argv = [script, *argv]
    runpy.run_path(str(REPOSITORY / script), run_name="__main__")
