"""The reference implementation's commands are taken as they stand; what sets nothing here says so."""

import shlex

import pytest

from hyvideo.config.flags import ALIASES, WITHOUT_EFFECT
from hyvideo.config.loading import load_config
from hyvideo.config.settings import SETTINGS
from hyvideo.config.sizes import parse_size
from hyvideo.training.checks import check_config
from tests.support.release import TRAINING

LAUNCHER = (
    TRAINING
    + """ --reward_checkpoint_mode "v3" --validate_at_step0 False --validate_video_length 121
--validation_timestep_shift 5.0"""
)
"""The arguments of its launcher."""


@pytest.mark.parametrize("command", [TRAINING, LAUNCHER], ids=["readme", "launcher"])
def test_the_references_commands_are_taken_as_they_stand(command, capsys):
    cfg = load_config(shlex.split(command))
    check_config(cfg, 8, files=False)
    assert (cfg.kl.kl_coef, cfg.parallel.sp_size, cfg.run.output_dir) == (1e-7, 2, "./outputs")
    assert capsys.readouterr().err == ""


def test_a_flag_of_another_name_sets_ours():
    cfg = load_config(["--validation_video_length", "121", "--post_train_type", "grpo"])
    assert (cfg.grpo.algorithm, cfg.validation.validate_video_length) == ("grpo", 121)
    assert load_config(["--video_length=33"]).validation.validate_video_length == 33


@pytest.mark.parametrize(
    ("version", "size", "taken"),
    [("480p_t2v", "none", (480, 848)), ("720p_i2v", "None", (720, 1280)), ("720p_t2v", "480*864", (480, 864))],
)
def test_a_size_is_taken_in_the_references_spellings(version, size, taken):
    cfg = load_config(["--validation_fixed_size", size, "--pretrained_transformer_version", version])
    assert parse_size(cfg.validation.validation_fixed_size) == taken


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_flag_without_effect_is_taken_and_says_so_once(name, capsys, monkeypatch):
    for values in ([], ["4"], ["a red circle", "a blue square"]):
        assert load_config([f"--{name}", *values, "--eta", "0.4"]) == load_config(["--eta", "0.4"])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"post_train.py: --{name} has no effect: ")
    monkeypatch.setenv("RANK", "1")
    load_config([f"--{name}", "4"])
    assert capsys.readouterr().err == ""


def test_no_flag_of_ours_is_hidden():
    assert not set(SETTINGS) & (set(ALIASES) | set(WITHOUT_EFFECT))
    assert {alias.setting for alias in ALIASES.values()} <= {"", *SETTINGS}


def test_a_switch_of_the_release_sets_a_word_of_ours_and_our_own_name_counts_more(tmp_path):
    (tmp_path / "run.yaml").write_text("parallel: {offload: [ema]}\nmodel: {enable_gradient_checkpointing: false}")
    file = ["--config", str(tmp_path / "run.yaml")]

    def loaded(*flags: str) -> tuple[str, list[str]]:
        parallel = load_config([*file, *flags]).parallel
        return parallel.activation_checkpointing, parallel.offload

    assert loaded() == ("none", ["ema"])
    assert loaded("--reference_mode_offload", "True", "--cpu_offload") == ("none", ["anchor", "ema", "weights"])
    assert loaded("--ema_offload", "no", "--enable_gradient_checkpointing") == ("full", [])
    assert loaded("--activation_checkpointing", "cheap", "--enable_gradient_checkpointing") == ("cheap", ["ema"])
    assert loaded("--offload", "reward", "--encoder_offload", "true") == ("none", ["reward"])
    assert loaded("--offload") == ("none", [])
    with pytest.raises(ValueError, match="--ema_offload: expected true or false; received 'maybe'"):
        loaded("--ema_offload", "maybe")
    with pytest.raises(ValueError, match="--offload: expected some of anchor, reward, .*; received .'models'"):
        loaded("--offload", "models")


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("lora_dropout", "0", "0.1"),
        ("reward_checkpoint_mode", "v3", "v2"),
        ("kl_compute_mode", "rollout_phase", "training_phase"),
    ],
)
def test_a_name_of_which_one_value_exists_takes_no_other(name, value, other, tmp_path):
    assert load_config([f"--{name}", value]) == load_config([])
    with pytest.raises(ValueError, match=f"--{name}: expected only .*; received '{other}'"):
        load_config([f"--{name}", other])
    (tmp_path / "run.yaml").write_text(f"{name}: {other}")
    with pytest.raises(ValueError, match=f"run.yaml: {name}: expected only"):
        load_config(["--config", str(tmp_path / "run.yaml")])
