"""A run folder belongs to one run: it is fresh, resumed, or refused."""

import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from hyvideo.checkpoint.run_folder import RunFolder, open_run_folder
from hyvideo.checkpoint.train_state import begin_save
from hyvideo.config.loading import load_config, save_config
from hyvideo.config.schema import RunConfig


def save(checkpoints: Path, step: int, **facts: object) -> Path:
    return begin_save(checkpoints, step, {"policy": {"w": torch.zeros(1)}}, facts).finish()


def opened(folder: Path, resume: object = None) -> RunFolder:
    return open_run_folder(RunConfig(output_dir=str(folder), resume_from_checkpoint=resume and str(resume)))


def test_a_new_folder_lies_where_asked_or_is_named_after_run_and_time_and_is_made_later(tmp_path, monkeypatch):
    folder = opened(tmp_path / "a" / "run")
    assert folder.path == tmp_path / "a" / "run" and not folder.path.exists() and folder.resume_from is None
    monkeypatch.chdir(tmp_path)
    folder, now = open_run_folder(RunConfig(run_name="tiny")), datetime.now()
    then = datetime.strptime(str(folder.path), "outputs/tiny-%Y%m%d-%H%M%S")
    assert 0 <= (now - then).total_seconds() < 60


def test_a_file_where_the_run_writes_is_named_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file' is a file; expected a folder"):
        opened(tmp_path / "file")


@pytest.mark.parametrize("wanted", [None, "latest", "path"])
def test_what_a_start_leaves_that_failed_before_its_first_update_is_no_run(tmp_path, wanted):
    checkpoint = save(tmp_path / "old" / "checkpoints", 4)
    run = tmp_path / "run"
    for name in ("config.yaml", "console.log", "metrics.jsonl", ".lock", "tb/events.out.tfevents.1", "notes.txt"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    (run / "checkpoints").mkdir()
    expected = checkpoint if wanted == "path" else None
    assert opened(run, expected or wanted).resume_from == opened(tmp_path / "new", expected).resume_from == expected
    (checkpoint / "facts.json").unlink()
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        opened(tmp_path / "new", checkpoint)


def test_of_a_folder_that_has_lost_latest_the_only_checkpoint_is_continued_and_several_are_refused(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    only = save(checkpoints, 1)
    (checkpoints / "latest").unlink()  # as a kill in the first save leaves it
    assert opened(tmp_path, "latest").resume_from == only
    save(checkpoints, 2)
    save(checkpoints, 10)
    (checkpoints / "latest").unlink()
    said = rf"latest' is missing.*step_1, step_2, step_10\. .*--resume_from_checkpoint {checkpoints / 'step_10'}, or"
    with pytest.raises(ValueError, match=said):
        opened(tmp_path, "latest")


def test_a_used_folder_is_refused_with_the_two_ways_on_and_continues_no_other_runs_checkpoint(tmp_path):
    other, run = save(tmp_path / "other" / "checkpoints", 4), tmp_path / "run"
    own = save(run / "checkpoints", 2)
    with pytest.raises(ValueError, match=r"holds a run \(checkpoints\).*_checkpoint latest; .*another --out"):
        opened(run, other)
    with pytest.raises(ValueError, match=r"already holds a run \(checkpoints\).*from_checkpoint latest.*another"):
        opened(run)
    shutil.rmtree(own.parent)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"already holds a run \(metrics\.jsonl\).*from_checkpoint latest.*another"):
        opened(run)
    with pytest.raises(ValueError, match=r"already holds a run \(metrics\.jsonl\)"):
        opened(run, other)


def test_a_run_from_another_ones_checkpoint_begins_again_from_it_until_it_has_its_own(tmp_path):
    other, run = save(tmp_path / "other" / "checkpoints", 4), tmp_path / "run"
    config = load_config(["--output_dir", str(run), "--resume_from_checkpoint", str(other)])
    run.mkdir()
    save_config(config, run / "config.yaml")
    (run / "metrics.jsonl").write_text('{"step": 5}\n')
    assert open_run_folder(config.run).resume_from == other
    with pytest.raises(ValueError, match=f"It continued '{other}'.*pass --resume_from_checkpoint {other};"):
        opened(run, "latest")
    save(run / "checkpoints", 5)
    with pytest.raises(ValueError, match="pass --resume_from_checkpoint latest;"):
        open_run_folder(config.run)


def test_an_own_checkpoint_is_continued_by_whatever_path_it_is_named(tmp_path, monkeypatch):
    own = save(tmp_path / "run" / "checkpoints", 2)
    (tmp_path / "alias").symlink_to(tmp_path / "run")
    (tmp_path / "good").symlink_to(own)
    monkeypatch.chdir(tmp_path)
    for name in ("alias/checkpoints/step_2", "good", "run/checkpoints/../checkpoints/step_2/", str(own)):
        folder = opened("run", name)
        assert folder.continues_itself and folder.resume_from == Path("run/checkpoints/step_2")
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")  # moved to another disk by hand
    for name in ("latest", str(own)):
        assert opened("run", name).continues_itself


def test_a_run_that_came_in_between_is_noticed_before_anything_is_written(tmp_path):
    config = RunConfig(output_dir=str(tmp_path / "run"), resume_from_checkpoint="latest")
    new = open_run_folder(config)
    new.require_unchanged(config)
    save(tmp_path / "run" / "checkpoints", 1)
    with pytest.raises(ValueError, match=r"another run has written to .*continue from .*step_1, not from None"):
        new.require_unchanged(config)
    open_run_folder(config).require_unchanged(config)
    with pytest.raises(ValueError, match="already holds a run"):
        new.require_unchanged(replace(config, resume_from_checkpoint=None))


def test_videos_of_a_policy_that_was_thrown_away_are_moved_aside(tmp_path):
    folder = opened(tmp_path)
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
