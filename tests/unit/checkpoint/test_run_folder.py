"""A run folder belongs to one run: it is fresh, resumed, or refused."""

import os
from datetime import datetime
from pathlib import Path

import pytest
import torch

from hyvideo.checkpoint.run_folder import open_run_folder
from hyvideo.checkpoint.train_state import begin_save
from hyvideo.config.schema import RunConfig


def save(checkpoints: Path, step: int, **facts: object) -> Path:
    return begin_save(checkpoints, step, {"policy": {"w": torch.zeros(1)}}, facts).finish()


def test_a_new_folder_lies_exactly_where_asked_and_is_made_by_the_runs_first_file(tmp_path: Path):
    folder = open_run_folder(RunConfig(output_dir=str(tmp_path / "a" / "run")))
    assert folder.path == tmp_path / "a" / "run"
    assert not folder.path.exists()
    assert folder.resume_from is None
    assert [path.name for path in (folder.checkpoints, folder.rollouts, folder.samples)] == [
        "checkpoints",
        "rollouts",
        "samples",
    ]


def test_without_a_folder_it_is_named_after_run_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = open_run_folder(RunConfig(run_name="tiny"), now=datetime(2026, 1, 2, 3, 4, 5))
    assert folder.path == Path("outputs/tiny-20260102-030405")


def test_an_existing_folder_with_other_files_is_fresh(tmp_path: Path):
    (tmp_path / "notes.txt").touch()
    assert open_run_folder(RunConfig(output_dir=str(tmp_path))).resume_from is None


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_a_used_folder_is_refused_with_the_two_ways_on(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"already holds a run \({name}\).*resume_from_checkpoint latest.*another"):
        open_run_folder(RunConfig(output_dir=str(tmp_path)))


@pytest.mark.parametrize("name", ["rollouts", "samples", "tb", "metrics.jsonl", "console.log"])
def test_something_else_where_the_run_writes_is_named_before_anything_is_loaded(tmp_path: Path, name: str):
    if "." in name:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"{name}' must be a (file|folder) or not be there. Move it away"):
        open_run_folder(RunConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest"))


def test_latest_continues_the_newest_checkpoint(tmp_path: Path):
    (tmp_path / "config.yaml").touch()
    save(tmp_path / "checkpoints", 1)
    newest = save(tmp_path / "checkpoints", 2)
    folder = open_run_folder(RunConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest"))
    assert folder.resume_from == newest


@pytest.mark.parametrize("leftovers", [[], ["config.yaml", "metrics.jsonl"]], ids=["new", "killed before a checkpoint"])
def test_latest_with_no_checkpoint_yet_starts_fresh(tmp_path: Path, leftovers: list[str]):
    for name in leftovers:
        (tmp_path / name).touch()
    assert open_run_folder(RunConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest")).resume_from is None


def test_a_path_continues_another_runs_checkpoint_in_a_new_folder(tmp_path: Path):
    checkpoint = save(tmp_path / "old" / "checkpoints", 4)
    folder = open_run_folder(RunConfig(output_dir=str(tmp_path / "new"), resume_from_checkpoint=str(checkpoint)))
    assert folder.resume_from == checkpoint


@pytest.mark.parametrize(("max_steps", "expected"), [(3, "step_3"), (4, "step_2")], ids=["as long", "longer"])
def test_a_longer_run_makes_a_round_again_that_was_cut_short(tmp_path: Path, max_steps: int, expected: str):
    save(tmp_path / "checkpoints", 2, round_start=None)
    save(tmp_path / "checkpoints", 3, round_start=2)
    for wanted in ("latest", str(tmp_path / "checkpoints" / "step_3")):
        config = RunConfig(output_dir=str(tmp_path), resume_from_checkpoint=wanted, max_steps=max_steps)
        assert open_run_folder(config).resume_from.name == expected


def test_a_longer_run_starts_afresh_where_the_first_round_was_cut_short(tmp_path: Path):
    save(tmp_path / "checkpoints", 1, round_start=0)
    config = RunConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest", max_steps=4)
    assert open_run_folder(config).resume_from is None


def test_an_unreadable_checkpoint_is_refused(tmp_path: Path):
    (tmp_path / "step_1").mkdir()
    config = RunConfig(output_dir=str(tmp_path / "run"), resume_from_checkpoint=str(tmp_path / "step_1"))
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        open_run_folder(config)


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        open_run_folder(RunConfig(output_dir=str(tmp_path / "run")))


def test_videos_of_a_policy_that_was_thrown_away_are_moved_aside(tmp_path: Path):
    folder = open_run_folder(RunConfig(output_dir=str(tmp_path)))
    for name in ("samples/step_2", "samples/step_4", "rollouts/step_2", "rollouts/step_4", "samples/notes"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "000.mp4").write_text(name)
    for _ in range(2):
        folder.discard_after(2)
        assert sorted(path.name for path in folder.samples.iterdir()) == ["notes", "step_2"]
        assert [path.name for path in folder.rollouts.iterdir()] == ["step_2"]
        assert (tmp_path / "discarded" / "samples" / "step_4" / "000.mp4").read_text() == "samples/step_4"
    (tmp_path / "samples" / "step_4").mkdir()
    folder.discard_after(2)
    assert sorted(path.name for path in (tmp_path / "discarded" / "samples").iterdir()) == ["step_4", "step_4.1"]
