"""A run of two ranks to which everything happens that can: what was finished stays, and the end is the same."""

import contextlib
import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hyvideo.checkpoint.tensors import verify_files
from hyvideo.checkpoint.train_state import latest_checkpoint
from hyvideo.training.stop_signal import LOST, PREEMPTED
from tests.support.command_line import Command, CommandLine, Finished
from tests.support.equal_runs import assert_identical
from tests.support.ranks import free_port, rank_environment
from tests.support.rewards import BRIGHTNESS
from tests.support.training import arguments

WORLD_SIZE = 2
HANG = 240.0
"""Seconds without an update or an end after which a start hangs."""

GRACE = 10.0
"""Seconds that the other ranks get when one has failed, before they are killed (torchrun's rule)."""

SETTINGS = {"enable_fsdp": True, "use_lora": True, "num_generations": 2, "batch_size": 1, "grpo_sampling_steps": 2}
SETTINGS |= {"rollout_micro_batch_size": 1, "mini_batch_size_per_update": 1, "save_interval": 1, "keep_last": 3}
SETTINGS |= {"reward_model": BRIGHTNESS, "reward_weights": '{"brightness": 1.0}'}
SETTINGS |= {"resume_from_checkpoint": "latest", "max_steps": 10_000}


@dataclass
class Run:
    command_line: CommandLine
    folder: Path
    root: Path
    csv: Path
    ranks: list[Command] = field(default_factory=list)

    def start(self, fault: str = "", after: int = 0, faulty_rank: int = 0, **settings: Any) -> None:
        """Start all ranks; `fault` is one of `tests/support/faulty_post_train.py`."""
        argv, port = arguments(self.root, self.csv, self.folder, **{**SETTINGS, **settings}), free_port()
        self.ranks = []
        for rank in range(WORLD_SIZE):
            environment = rank_environment(rank, WORLD_SIZE, port) | {"FAULT": fault, "FAULT_AFTER": str(after)}
            script = "tests/support/faulty_post_train.py" if fault and rank == faulty_rank else "post_train.py"
            self.ranks.append(self.command_line.start(script, argv, environment))

    def num_rows(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def go_on_for(self, num_updates: int) -> None:
        """Wait for more updates than are logged now, or for the end of a rank."""
        wanted, deadline = self.num_rows() + num_updates, time.monotonic() + HANG
        while self.num_rows() < wanted and all(rank.is_alive() for rank in self.ranks):
            assert time.monotonic() < deadline, "the run makes no updates"
            time.sleep(0.01)

    def wait(self) -> list[Finished]:
        """Wait for the end as a launcher does: when a rank fails, the others are asked to end, then killed."""
        logged, deadline, failed_at = -1, 0.0, None
        while any(rank.is_alive() for rank in self.ranks):
            if self.num_rows() != logged:
                logged, deadline = self.num_rows(), time.monotonic() + HANG
            if time.monotonic() > deadline:
                self.signal_all(signal.SIGKILL)
                raise AssertionError(f"hangs: {[rank.wait() for rank in self.ranks]}")
            if failed_at is None and any(rank.exitcode not in (None, 0, PREEMPTED) for rank in self.ranks):
                failed_at = time.monotonic()
                self.signal_all(signal.SIGTERM)
            if failed_at is not None and time.monotonic() > failed_at + GRACE:
                self.signal_all(signal.SIGKILL)
            time.sleep(0.02)
        return [rank.wait() for rank in self.ranks]

    def signal_all(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.is_alive():
                rank.signal(number)


@dataclass(frozen=True)
class Fault:
    """What happens to a started run, the statuses of which every rank's is one, and what a rank says (a pattern)."""

    happen: Callable[[Run, random.Random], list[Finished]]
    statuses: tuple[int, ...]
    says: str = ""


def signalled(number: signal.Signals) -> Callable[[Run, random.Random], list[Finished]]:
    def happen(run: Run, chance: random.Random) -> list[Finished]:
        run.start(async_save=chance.random() < 0.5)
        run.go_on_for(chance.randrange(1, 3))
        time.sleep(chance.random() * 0.5)
        chance.choice(run.ranks).signal(number)
        return run.wait()

    return happen


def inside(fault: str, *, most_calls: int = 6, most_updates: int = 8) -> Callable[[Run, random.Random], list[Finished]]:
    """Something goes wrong inside a rank; a run that bears it is preempted after some updates."""

    def happen(run: Run, chance: random.Random) -> list[Finished]:
        run.start(fault, chance.randrange(most_calls), chance.randrange(WORLD_SIZE))
        run.go_on_for(most_updates)
        run.signal_all(signal.SIGTERM)
        return run.wait()

    return happen


def full_disk(run: Run, chance: random.Random) -> list[Finished]:
    """Something else takes all room on the disk of the run while it goes on."""
    run.start(async_save=chance.random() < 0.5)
    run.go_on_for(chance.randrange(1, 3))
    filler = run.folder.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    finished = run.wait()
    filler.unlink()
    return finished


def read_only_disk(run: Run, chance: random.Random) -> list[Finished]:
    mount("-o", "remount,ro", run.folder.parent)
    run.start()
    finished = run.wait()
    mount("-o", "remount,rw", run.folder.parent)
    return finished


KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM
FAILED = (1, LOST, KILLED, TERMINATED, PREEMPTED)
"""Statuses when a rank failed: 1 or lost, and those of the others, which are ended at any moment."""

FAULTS = {
    "a rank is killed": Fault(signalled(signal.SIGKILL), FAILED),
    "a rank is terminated": Fault(signalled(signal.SIGTERM), (PREEMPTED,), "SIGTERM: saved and stopped after step"),
    "the disk is full": Fault(full_disk, FAILED, "nothing was written. .* GB are free|No space left on device"),
    "the disk is read-only": Fault(read_only_disk, (2,), "post_train.py: .*Read-only file system"),
    "the loss is NaN": Fault(inside("the loss is NaN"), FAILED, "not finite"),
    "a gradient is infinite": Fault(inside("a gradient is infinite"), FAILED, "not finite"),
    "a weight is NaN": Fault(inside("a weight is NaN"), FAILED, "not finite"),
    "the encoder raises": Fault(inside("the encoder raises", most_calls=2), FAILED, "encoders failed at the prompt '"),
    "the decoder runs out of memory": Fault(inside("the decoder runs out of memory"), FAILED, "out of GPU memory on"),
    "a file cannot be read back": Fault(
        inside("a file cannot be read back"), (*FAILED, 2), "(Cannot save|cannot be read).* Input/output error"
    ),
    "the clock jumps": Fault(inside("the clock jumps", most_updates=4), (PREEMPTED,), "saved and stopped after step"),
    "the disk is slow": Fault(inside("the disk is slow", most_updates=4), (PREEMPTED,), "saved and stopped after step"),
}


def mount(*arguments: Any) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=32m", "tmpfs", disk)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a file system (root)")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def assert_nothing_lost(run: Run, logged: int) -> None:
    """The last checkpoint is whole and at most two updates older than the log was.

    Two: one of `save_interval`, one that `async_save` is still writing.
    """
    latest = latest_checkpoint(run.folder / "checkpoints")
    verify_files(latest)
    assert json.loads((latest / "facts.json").read_text())["step"] >= max(logged, run.num_rows()) - 2


FEW = ("the disk is full", "a file cannot be read back", "the encoder raises")


@pytest.mark.parametrize(
    "names", [pytest.param(FEW, id="few"), pytest.param(sorted(FAULTS) * 5, id="many", marks=pytest.mark.slow)]
)
def test_a_run_under_faults_ends_as_the_undisturbed_one(
    command_line, small_disk, root_of_four_heads, prompts_csv, tmp_path, names
):
    run = Run(command_line, small_disk / "run", root_of_four_heads, prompts_csv)
    run.start()
    run.go_on_for(3)
    run.signal_all(signal.SIGTERM)
    run.wait()
    chance = random.Random(len(names))
    for name in chance.sample(names, len(names)):
        logged = run.num_rows()
        finished = FAULTS[name].happen(run, chance)
        statuses, said = [rank.returncode for rank in finished], "\n".join(rank.stderr for rank in finished)
        assert set(statuses) <= set(FAULTS[name].statuses), f"{name}: {statuses}\n{said[-6000:]}"
        assert re.search(FAULTS[name].says, said), f"{name}: {said[-6000:]}"
        assert_nothing_lost(run, logged)

    last = run.num_rows() + 2
    whole = Run(command_line, tmp_path / "whole", root_of_four_heads, prompts_csv)
    for one in (run, whole):
        one.start(max_steps=last)
        assert [rank.returncode for rank in one.wait()] == [0, 0]
    assert_identical(run.folder, whole.folder)
