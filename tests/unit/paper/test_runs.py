"""Trainings are processes of their own: named when they fail, stopped and continued without harm."""

import fcntl
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

import pytest

from scripts.paper.reproduce import PaperRun
from scripts.paper.runs import REPOSITORY, log_of, train

SMALL = "--sample_n_frames 5 --rollout_size 32x32 --grpo_sampling_steps 2 --batch_size 2 --num_generations 2 "
SMALL += "--mini_batch_size_per_update 2 --validation_interval 0 --save_interval 1"


def small_run(folder: Path, *flags: str) -> PaperRun:
    """A training of 10,000 small updates."""
    training = ["--config", "configs/tiny.yaml", *SMALL.split(), "--output_dir", str(folder), *flags]
    launch = [sys.executable, str(REPOSITORY / "post_train.py")]
    return PaperRun("sage-dual-b", 1, folder, training, launch, [], "", max_steps=10_000, metrics=[], keeps=True)


@pytest.fixture
def run(tmp_path: Path) -> PaperRun:
    return small_run(tmp_path / "runs" / "a")


def test_a_run_that_fails_is_named_with_its_log(tmp_path):
    broken = small_run(tmp_path / "a", "--batch_sise", "3")  # refused before PyTorch is imported
    assert train([broken], jobs=2) == [f"a: status 2, see {log_of(broken)}"]
    assert "the nearest is --batch_size" in log_of(broken).read_text()


def test_a_training_that_ends_too_early_is_not_measured(tmp_path):
    run = small_run(tmp_path / "a")
    early = replace(run, launch=["true"])
    assert train([early], jobs=1) == [f"a: it ended before its work was done, see {log_of(run)}"]


def test_after_its_minutes_nothing_is_started_and_nothing_has_failed(run):
    assert train([run], jobs=1, minutes=0) == [] and not run.folder.exists()


def stop_this_process_after(path: Path) -> None:
    """Send it SIGTERM as soon as a file is there."""

    def stop_it() -> None:
        while not path.is_file():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=stop_it, daemon=True).start()


def test_a_run_that_is_stopped_while_it_trains_has_not_failed_and_is_saved(run):
    stop_this_process_after(run.folder / "metrics.jsonl")
    assert train([run], jobs=1) == []
    assert (run.folder / "checkpoints" / "latest").is_file() and not run.is_finished


@dataclass
class Measurement:
    """A run of one command, which starts a program of its own and waits for it."""

    folder: Path
    looks: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether somebody has made it, which this finds out at the second look."""
        self.looks += 1
        return self.folder.name == "made" and self.looks > 1

    def commands(self) -> list[list[str]]:
        child = self.folder.parent / "child"
        return [["bash", "-c", f"sleep 100 & echo $! > {child}.new; mv {child}.new {child}; wait"]]

    def tidy(self) -> None:
        """It leaves nothing."""


def test_a_measurement_that_is_stopped_takes_its_programs_with_it(tmp_path):
    child = tmp_path / "child"
    stop_this_process_after(child)
    assert train([Measurement(tmp_path / "a")], jobs=1) == []
    state = Path(f"/proc/{child.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_run_that_another_command_has_finished_meanwhile_is_not_made_again(tmp_path):
    assert train([Measurement(tmp_path / "made")], jobs=1) == [] and not (tmp_path / "child").exists()


def test_a_run_that_another_command_trains_is_left_to_it(run):
    run.folder.parent.mkdir(parents=True)
    with log_of(run).open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert train([run], jobs=1) == []
    assert log_of(run).read_text() == "" and not run.folder.exists()
