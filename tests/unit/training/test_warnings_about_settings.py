"""Valid settings that are probably unintended are warned about, and documented runs warn of nothing."""

import json
import re
from pathlib import Path

import pytest

from hyvideo.config.loading import load_config, load_saved_config, save_config
from hyvideo.config.schema import Config
from hyvideo.training.checks import check_config, hardly_meant, known_sampling, unread_settings


@pytest.fixture
def released(tmp_path: Path):
    """Make configurations of a released version, of which only the config.json is there."""

    def config_of(version: str, *flags: str) -> Config:
        folder = tmp_path / "transformer" / version
        folder.mkdir(parents=True)
        facts = {"ideal_resolution": version[:4], "ideal_task": version[5:8], "use_meanflow": "step" in version}
        (folder / "config.json").write_text(json.dumps(facts))
        model = ["--pretrained_model_root", str(tmp_path), "--pretrained_transformer_version", version]
        return load_config([*model, "--valid_video_csv", "valid.csv", *flags])

    return config_of


def said(config: Config) -> list[str]:
    return list(hardly_meant(config, known_sampling(config)))


UNREAD = [
    (["--sde_window_size", "2"], "sde_window_size 2", ["--sde_window", "first"]),
    (["--lora_r", "4", "--lora_alpha", "4"], "lora_r 4, lora_alpha 4", ["--use_lora", "--learning_rate", "1e-4"]),
    (["--reward_config", "{}", "--reward_model", "clip_score"], "reward_model clip_score", ["--reward_config", "none"]),
    (["--use_dual_kl", "no", "--dual_kl_step_weight", "1"], "dual_kl_step_weight 1", ["--use_dual_kl", "yes"]),
    (["--kl_schedule", "fixed", "--kl_coef", "1e-6"], "kl_coef 1e-06", ["--kl_schedule", "milder"]),
    (["--sde_type", "cps", "--sage_clamp", "0.1"], "sage_clamp 0.1", ["--sde_type", "sage_grpo"]),
    (["--use_moving_KL", "no", "--update_ref_model_step", "5"], "update_ref_model_step 5", ["--use_moving_KL", "yes"]),
]


@pytest.mark.parametrize(("flags", "named", "partner"), UNREAD)
def test_a_setting_that_nothing_reads_is_named_with_what_would_read_it(flags, named, partner):
    (message,) = unread_settings(load_config(flags))
    assert f"nothing reads {named}" in message and partner[0].removeprefix("--") in message
    assert list(unread_settings(load_config([*flags, *partner]))) == []


def test_what_nothing_reads_may_have_its_default_also_when_it_was_saved(tmp_path: Path):
    config = load_config(["--use_dual_kl", "no", "--use_moving_KL", "no", "--lora_r", "8", "--reward_config", "{}"])
    save_config(config, tmp_path / "config.yaml")
    assert list(unread_settings(config)) == list(unread_settings(load_saved_config(tmp_path / "config.yaml"))) == []


@pytest.mark.parametrize("version", ["480p_t2v_distilled", "720p_i2v_distilled", "480p_i2v_step_distilled"])
def test_guidance_is_refused_for_a_distilled_version_and_1_is_not(released, version: str):
    config = released(version, "--cfg_scale", "6")
    told = f"  - cfg_scale is 6, but {version} is distilled.* Set cfg_scale to 1"
    for scale in (6.0, 1.0):
        config.rollout.cfg_scale = scale
        with pytest.raises(ValueError, match="train_video_csv is empty") as refused:
            check_config(config, 1)
        assert bool(re.search(told, str(refused.value))) == ("cfg_scale" in str(refused.value)) == (scale > 1)


@pytest.mark.usefixtures("at_the_root")
def test_the_released_recipe_and_the_bundled_model_start_without_a_warning(released):
    assert said(released("480p_t2v", "--config", "configs/sage_64gpu.yaml")) == []
    assert said(released("480p_i2v", "--config", "configs/sage_8gpu.yaml", "configs/lora.yaml")) == []
    own = ["--infer_flow_shift_video", "9", "--validation_timestep_shift", "9", "--cfg_scale", "6"]
    assert said(released("720p_t2v", *own)) == [], "the paper's sampler, on another version's own schedule"
    for files in (["configs/tiny.yaml"], ["configs/tiny.yaml", "configs/demo.yaml"]):
        assert said(load_config(["--config", *files])) == []


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--grpo_sampling_steps", "6"], "0.23"),
        (["--sde_type", "dance_grpo"], "0.27"),
        (["--sde_window", "per_group", "--sde_window_size", "2", "--eta", "0.8"], "0.14"),
    ],
)
def test_noise_that_the_sampler_leaves_is_said(released, flags, left):
    (message,) = said(released("480p_t2v", *flags))
    assert f"standard deviation {left} in the finished latents" in message


def test_what_a_felt_kl_on_few_steps_costs_in_noise_is_said(released):
    config = released("480p_t2v", "--anchor_fraction", "0.1")
    assert said(config) == []
    config.kl.kl_weight = 0.1
    (message,) = said(config)
    assert "rests on 2 of 20 steps, so its gradient has about 3.2 times the noise" in message


@pytest.mark.usefixtures("at_the_root")
def test_a_model_meant_for_few_steps_may_hold_what_the_papers_sampler_leaves_in_as_few_of_them():
    """The paper trains in 20 of 50 steps; the bundled model, of whose own steps there are 12, may so have 5."""
    tiny = ["--config", "configs/tiny.yaml", "--grpo_sampling_steps"]
    assert said(load_config([*tiny, "5"])) == []
    (message,) = said(load_config([*tiny, "4"]))
    assert "(usual is at most 0.19)" in message and "(at most 1.16)" in message


def test_settings_that_differ_from_the_versions_own_are_named_with_both_values(released):
    config = released("720p_t2v", "--cfg_scale", "4")
    (message,) = said(config)
    assert "cfg_scale is 4, the model's is 6; infer_flow_shift_video is 5, the model's is 9" in message
    assert "validation_timestep_shift is 5, the model's is 9" in message
    flags = ["--infer_flow_shift_video", "7", "--validation_interval", "0"]  # nothing uses the validation's
    assert said(released("720p_i2v", *flags)) == []
    config.rollout.cfg_scale, config.validation.validation_timestep_shift = 6.0, 9.0
    assert said(config) == []  # rollouts alone may differ on purpose


def test_a_model_that_does_not_say_how_it_is_sampled_is_left_alone(tiny_root: Path):
    config = load_config(["--pretrained_model_root", str(tiny_root), "--infer_flow_shift_video", "3"])
    assert said(config) == []


def test_all_weights_in_bfloat16_are_warned_of_and_an_adapter_only_at_their_rate(released):
    config = released("480p_t2v", "--master_weight_type", "bf16")
    (message,) = said(config)
    assert "most updates are rounded away" in message and "use_lora" in message
    config.model.use_lora = True
    (message,) = said(config)
    assert "use_lora is true at learning_rate 1e-05" in message and "configs/lora.yaml" in message
    config.optimizer.learning_rate = 1e-4
    assert said(config) == []


def test_a_run_says_its_warnings_once_when_it_starts(make_training):
    training = make_training(use_lora=True, learning_rate=1e-5)
    log = (training.folder.path / "console.log").read_text()
    assert log.count("WARNING: use_lora is true at learning_rate 1e-05") == 1
