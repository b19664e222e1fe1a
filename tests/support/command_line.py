"""The entry files run as commands, in processes of their own, without paying their seconds of imports each time.

A fork of the server (`tests.support.ranks`), which has imported the entry files, runs one as `__main__`, with its own
arguments, working directory and output.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import MappingProxyType

from tests.support.ranks import forking_context, free_port, rank_environment
from tests.support.training import REPOSITORY

TIMEOUT = 600.0
"""Seconds after which a command that should have ended is a failed test."""


Finished = subprocess.CompletedProcess[str]
"""A command that ended: its exit status (negative for a signal) and what it wrote."""


class Command(ForkServerProcess):
    """A running command; `wait` for it, or `signal_when` something has happened."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], folder: Path, outputs: Path) -> None:
        super().__init__()
        self._argv, self._environment, self._folder, self._outputs = list(argv), dict(environment), folder, outputs

    def run(self) -> None:
        """Be the command: in the forked process."""
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(self._outputs / name, os.O_WRONLY | os.O_CREAT), descriptor)
        os.environ |= self._environment
        os.chdir(self._folder)
        sys.argv = self._argv
        runpy.run_path(str(REPOSITORY / sys.argv[0]), run_name="__main__")

    def signal_when(self, number: signal.Signals, happened: Callable[[], bool]) -> None:
        """Send a signal as soon as `happened()`; an error if the command ends before."""
        deadline = time.monotonic() + TIMEOUT
        while not happened():
            assert self.is_alive(), f"the command ended too early: {self.wait()}"
            assert time.monotonic() < deadline, "what the test waits for did not happen"
            time.sleep(0.01)
        self.signal(number)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Finished:
        self.join(TIMEOUT)
        if self.is_alive():
            self.kill()
            raise AssertionError(f"no end after {TIMEOUT} s: {self.read('stderr')[-2000:]}")
        return Finished(self._argv, self.exitcode, self.read("stdout"), self.read("stderr"))

    def read(self, name: str) -> str:
        """Return what it wrote so far to `stdout` or `stderr`."""
        path = self._outputs / name
        return path.read_text() if path.exists() else ""


class CommandLine:
    """Starts commands in `folder`, which is empty at first; `outputs` gets a folder for what each writes."""

    def __init__(self, folder: Path, outputs: Path) -> None:
        self.folder = folder
        self._outputs = outputs
        forking_context()

    def start(self, script: str, argv: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> Command:
        """Start `python script argv...`, with `environment` added to this process's."""
        outputs = self._outputs / str(len(list(self._outputs.iterdir())))
        outputs.mkdir()
        command = Command([script, *argv], environment, self.folder, outputs)
        command.start()
        return command

    def run(self, script: str, argv: Sequence[str]) -> Finished:
        return self.start(script, argv).wait()

    def run_ranks(self, num_ranks: int, script: str, argv: Sequence[str]) -> None:
        """Run a command to a good end on several ranks, as torchrun does."""
        port = free_port()
        ranks = [self.start(script, argv, rank_environment(rank, num_ranks, port)) for rank in range(num_ranks)]
        finished = [rank.wait() for rank in ranks]
        assert [rank.returncode for rank in finished] == [0] * num_ranks, finished

    def call(self, command: Sequence[str]) -> int:
        """Stand in for `subprocess.call` of `[python, script, argv...]`; its stderr comes out of this process's."""
        finished = self.run(command[1], command[2:])
        print(finished.stderr, end="", file=sys.stderr)
        return finished.returncode
