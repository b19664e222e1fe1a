"""`post_train.py --dry_run` finds what would stop a run, prints its plan, and leaves nothing behind."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyvideo.checkpoint.run_folder import RunFolder
from hyvideo.config.loading import load_config
from hyvideo.config.schema import RunConfig
from hyvideo.distributed.gpus import Gpu
from hyvideo.models.reward_models.remote.server import create_app
from hyvideo.planning import preflight as module
from hyvideo.planning.preflight import check_space, preflight
from tests.support.reward_server import serving
from tests.support.rewards import Brightness
from tests.support.training import PROMPTS, arguments, write_prompts


@pytest.fixture
def dry_run(tiny_root: Path, prompts_csv: Path, tmp_path: Path):
    def check(**settings: object) -> str:
        return preflight(load_config(arguments(tiny_root, prompts_csv, tmp_path / "run", **settings)))

    return check


def test_the_command_prints_the_plan_and_writes_nothing(command_line, tiny_root, prompts_csv, tmp_path):
    flags = arguments(tiny_root, prompts_csv, tmp_path / "runs" / "new")
    before = sorted(tmp_path.rglob("*"))
    finished = command_line.run("post_train.py", [*flags, "--dry_run"])
    assert finished.returncode == 0, finished.stderr
    assert "peak: update" in finished.stdout and "prompt groups per round" in finished.stdout
    assert "dry run: 1 rank(s)" in finished.stdout and "no run folder was touched" in finished.stdout
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and "outputs_of" not in str(path)] == []


def test_weights_that_do_not_fit_are_found_without_reading_them(dry_run, tiny_root: Path, tmp_path: Path):
    damaged = shutil.copytree(tiny_root, tmp_path / "damaged")
    path = damaged / "transformer" / "config.json"
    path.write_text(path.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    with pytest.raises(ValueError, match="missing"):
        dry_run(pretrained_model_root=damaged)


def test_a_reward_without_weights_and_a_judge_that_cannot_be_built_or_has_too_few_videos_are_found(dry_run, tmp_path):
    judge = '{"models": {"moving_shapes": {"sub_reward": {"XQ": 1.0}}}}'
    settings = {"reward_guard": judge, "validation_interval": 1, "validation_num_videos": 8}
    with pytest.raises(ValueError, match="would compare 4 validation videos"):
        dry_run(**settings)
    with pytest.raises(ValueError, match="reward_guard: moving_shapes has no metric XQ"):
        dry_run(**settings, valid_video_csv=write_prompts(tmp_path / "valid.csv", 2 * PROMPTS))
    with pytest.raises(ValueError, match="VideoReward"):
        dry_run(reward_model="videoalign_local")


def test_a_reward_server_is_asked_as_the_run_will(dry_run, tiny_root, prompts_csv, tmp_path, monkeypatch):
    """Its plan is that of another run of the tiny model, which is rehearsed already."""
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    rehearsed, make_plan = load_config(arguments(tiny_root, prompts_csv, tmp_path / "run")), module.make_plan
    monkeypatch.setattr(module, "make_plan", lambda config, **others: make_plan(rehearsed, **others))
    with serving(create_app({"brightness": Brightness()}, video_fps=12)) as url:
        settings = {"reward_model": "brightness", "remote_reward_url": url, "reward_weights": '{"brightness": 1.0}'}
        assert "in order" in dry_run(video_fps=12, **settings)
        with pytest.raises(ValueError, match=r"video_fps is 24, but .* 12\.0"):
            dry_run(**settings)
        with pytest.raises(ValueError, match="brightness has no metric contrast"):
            dry_run(video_fps=12, **settings | {"reward_weights": '{"contrast": 1.0}'})


def test_a_checkpoint_of_other_settings_is_found(dry_run, trained):
    training = trained(max_steps=1)
    with pytest.raises(ValueError, match=r"eta is 0\.4, the checkpoint has 0\.5"):
        dry_run(resume_from_checkpoint=training.folder.checkpoints / "step_1", eta=0.4)


def test_a_folder_that_cannot_be_written_or_that_another_rank_does_not_see_is_named(dry_run, monkeypatch, tmp_path):
    def refuse(**keywords: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(PermissionError, match="Permission denied"):
        patch.setattr(module.tempfile, "TemporaryFile", refuse)
        dry_run()
    monkeypatch.setattr(module, "SEEN_WITHIN", 0.0)
    exists = module.Path.exists
    monkeypatch.setattr(module.Path, "exists", lambda path: not path.name.startswith(".dry_run-") and exists(path))
    with pytest.raises(ValueError, match="is not the folder that the first rank has there"):
        dry_run()
    monkeypatch.undo()
    assert not list(tmp_path.rglob(".dry_run-*"))


MANY = {"max_steps": 1000, "save_interval": 100, "keep_last": 3}
OFTEN = {"max_steps": 100, "save_interval": 1, "keep_last": 2}
ROOM = [(MANY, 4, False), (MANY | {"max_steps": 200}, 2, False), (MANY | {"save_interval": 0}, 1, False)]
ROOM += [(MANY | {"keep_last": 1, "keep_every": 200}, 7, False), (OFTEN, 3, False), (OFTEN, 4, True)]


@pytest.mark.parametrize(("settings", "needed", "keeps_best"), ROOM)
def test_as_many_checkpoints_must_find_room_as_the_run_has(tmp_path, monkeypatch, settings, needed, keeps_best):
    folder, run = RunFolder(tmp_path / "run", None), RunConfig(**settings)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed * 10))
    check_space(folder, run, checkpoint_bytes=10, keeps_best=keeps_best)
    with pytest.raises(ValueError, match=f"enough for {needed - 1} more .* the run will write {needed} more"):
        check_space(folder, run, checkpoint_bytes=11, keeps_best=keeps_best)


def test_a_plan_that_does_not_fit_this_gpu_or_the_hosts_memory_ends_it(dry_run, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    with pytest.raises(ValueError, match=r"GiB of host memory, but 1000000 process\(es\) need .* while they train"):
        dry_run()
    monkeypatch.setattr(module, "this_gpu", lambda: Gpu("small", 1.0, 1, 1))
    with pytest.raises(ValueError, match=r"but small has 1\. .*--search` looks for settings that fit"):
        dry_run()
