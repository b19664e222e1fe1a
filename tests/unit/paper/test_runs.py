"""Trainings of a study are processes of their own: made once, stopped and continued without harm."""

import fcntl
import json
import os
import signal
import time
from pathlib import Path
from threading import Thread

import pytest

from scripts.paper.runs import Run, log_of, train

SMALL = {
    "sample_n_frames": 5,
    "rollout_size": "32x32",
    "grpo_sampling_steps": 2,
    "batch_size": 2,
    "num_generations": 2,
    "mini_batch_size_per_update": 2,
    "updates_per_rollout": 1,
    "validation_num_videos": 1,
    "validate_video_length": 5,
    "validation_fixed_size": "32x32",
    "validation_num_inference_steps": 1,
    "validation_interval": 1,
    "save_interval": 1,
    "max_steps": 1,
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.of({**SMALL, "seed": 1}, tmp_path / "runs")


def test_a_run_is_made_once_and_keeps_what_it_measured_but_no_checkpoints(run, capsys):
    assert not run.is_finished
    assert train([run, run], jobs=2) == [], log_of(run).read_text()
    assert run.is_finished and not (run.folder / "checkpoints").exists()
    assert len(json.loads(run.scores_at(1).read_text())) >= 4
    rows = (run.folder / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert train([run], jobs=1) == []
    assert (run.folder / "metrics.jsonl").read_text() == rows and capsys.readouterr().out == ""


def test_a_run_that_fails_is_named_with_its_log(tmp_path):
    broken = Run.of({**SMALL, "seed": 1, "batch_size": 3}, tmp_path)
    assert train([broken], jobs=2) == [f"{broken.folder.name}: status 2, see {log_of(broken)}"]
    assert "batch_size" in log_of(broken).read_text()


def test_after_its_minutes_nothing_is_started_and_nothing_has_failed(run):
    assert train([run], jobs=1, minutes=0) == []
    assert not run.folder.exists()


def test_a_run_that_is_stopped_while_it_trains_has_not_failed_and_is_saved(tmp_path):
    long = Run.of({**SMALL, "seed": 1, "max_steps": 10_000}, tmp_path / "runs")

    def stop_it() -> None:
        while not (long.folder / "metrics.jsonl").is_file():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=stop_it, daemon=True).start()
    assert train([long], jobs=1) == []
    assert (long.folder / "checkpoints" / "latest").is_file() and not long.is_finished


def test_a_run_that_another_command_trains_is_left_to_it(run):
    run.folder.parent.mkdir(parents=True)
    with log_of(run).open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert train([run], jobs=1) == []
    assert log_of(run).read_text() == "" and not run.folder.exists()


@pytest.mark.parametrize("metrics", [None, "", '{"step": 0}\n', '{"step": 0}\n{"step": 1, "re'])
def test_a_run_without_its_last_row_is_not_finished(run, metrics):
    run.scores_at(1).parent.mkdir(parents=True)
    run.scores_at(1).write_text("{}\n")
    if metrics is not None:
        (run.folder / "metrics.jsonl").write_text(metrics)
    assert not run.is_finished
