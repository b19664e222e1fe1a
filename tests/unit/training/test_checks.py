"""Rules over the whole configuration: found before anything is built, all at once, with numbers and a way on."""

import re

import pytest

from hyvideo.config.loading import load_config
from hyvideo.training.build import read_inputs
from hyvideo.training.checks import check_config
from tests.support.training import PROMPTS, arguments, write_prompts


@pytest.fixture
def base(prompts_csv):
    """Flags of a configuration that passes on one rank."""
    return ["--batch_size", "4", "--train_video_csv", str(prompts_csv), "--valid_video_csv", str(prompts_csv)]


def problems(argv, world_size=1, **vae):
    """The lines of the error, or none."""
    try:
        check_config(load_config(argv), world_size, **vae)
    except ValueError as error:
        return str(error).splitlines()[1:]
    return []


def only_problem(argv, world_size=1):
    (line,) = problems(argv, world_size)
    return line


def test_an_adapter_cannot_stand_where_ranks_join_a_videos_tokens(base):
    for name in ("proj_out", "final_layer.linear"):  # as the original calls it
        adapter = [*base, "--use_lora", "--lora_target_modules", name]
        assert "has proj_out" in only_problem([*adapter, "--sp_size", "2"], 8) and problems(adapter, 8) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sample_n_frames", "80"], "received 80 frames of 352x624: take 77 or 81 frames of 352x624"),
        (["--validate_video_length", "2"], "validate_video_length and validation_fixed_size: A video must have"),
        (["--rollout_size", "350x624"], "sample_n_frames and rollout_size: A video must have 4 n + 1 frames"),
        (["--rollout_size", "4x624"], "take 81 frames of 16x624"),
        (["--validation_fixed_size", "480p"], "validation_fixed_size: a size is HEIGHTxWIDTH in pixels"),
        (["--sde_type", "cps", "--eta", "1.5"], "eta must be a finite number within [0, 1] for sde_type='cps', got 1."),
        (["--ema_decay", "0.9", "--master_weight_type", "bf16"], "ema_decay averages bf16 weights"),
        (["--sde_type", "cps", "--grpo_sampling_steps", "1"], "none of the 1 denoising steps is stochastic"),
        (["--updates_per_rollout", "81"], "updates_per_rollout must lie within [1, 80], the number of (sample, step) "),
        (["--updates_per_rollout", "77", "--sde_type", "cps"], "(4 samples x 19 steps), got 77"),
        (["--updates_per_rollout", "41", "--timestep_fraction", "0.5"], "(4 samples x 10 steps), got 41"),
        (["--reward_weights", '{"VQ": 0}'], "reward_weights must be finite numbers, at least one other than 0"),
        (["--reward_weights", '{"VQ": NaN}'], "reward_weights must be finite"),
        (["--remote_reward_url", "http://a", "--reward_checkpoint_path", "b"], "but nothing would load it"),
        (["--reward_guard", '{"models": {}}'], 'reward_guard: expected {"models": {NAME: '),
        (["--reward_max_failed", "1.1"], "reward_max_failed is 1.1, but must lie in [0, 1]"),
        (["--dtype", "fp32", "--master_weight_type", "bf16"], "set both to one of them"),
        (["--pretrained_lora_path", "."], "use_lora is false and nothing would load it"),
        (["--resume_may_change", "eta", "lr"], "resume_may_change: 'lr' is not a setting; the nearest is 'lora_r'"),
        (["--learning_rate", "inf"], "learning_rate is inf, but must lie in (0, inf)"),
        (["--gradient_accumulation_steps", str(10**12)], "gradient_accumulation_steps is 1000000000000, but must lie"),
        (["--collective_timeout", str(10**15)], "collective_timeout is 1000000000000000, but must lie"),
        (["--sample_n_frames", str(4 * 10**12 + 1)], "GiB per decoded video, but must be at most"),
        (["--rollout_size", "99984x99984"], "rollout_size: 81 frames of 99984x99984 are 2,262.4 GiB"),
    ],
)
def test_a_broken_rule_says_what_was_received_and_what_to_do(base, argv, message):
    assert message in only_problem([*base, *argv])


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--updates_per_rollout", "160", "--gradient_accumulation_steps", "2"],
        ["--grpo_sampling_steps", "3"],  # a window that is not used may be of any size
        ["--kl_weight", "0", "--kl_min_coef", "1", "--dual_kl_moving_weight", "0", "--dual_kl_step_weight", "0"],
        ["--timestep_fraction", "1"],
        ["--resume_from_checkpoint", "latest"],
        ["--sde_type", "cps"],
        ["--sde_type", "flow_grpo", "--grpo_sampling_steps", "1"],
    ],
)
def test_values_at_the_edge_pass(base, argv):
    assert problems([*base, *argv]) == []


def test_prompts_are_needed_and_without_validation_none_for_it(base):
    off = [*base[:4], "--validation_interval", "0"]
    assert problems(off) == [] and "valid_video_csv is empty" in only_problem(base[:4])
    assert "valid_video_csv is empty" in only_problem([*off, "--validate_at_step0"])
    missing = only_problem([*base[:2], *base[4:]])
    assert "train_video_csv is empty" in missing and "starter prompts: assets/prompts/train.csv" in missing


def test_the_factors_are_those_of_the_vae_in_use(base):
    argv = [*base, "--sample_n_frames", "9", "--rollout_size", "24x40"]
    assert problems(argv, vae_spatial=8, vae_temporal=8) == []
    (line,) = problems(argv, vae_spatial=16, vae_temporal=16)
    assert "received 9 frames of 24x40: take 1 or 17 frames of 32x32" in line


def test_all_problems_come_in_one_error_a_line_each(base):
    argv = ["--sample_n_frames", "80", "--eta", "0"]
    argv += ["--batch_size", "6", "--dp_replicate", "3"]  # two rules of the layout
    with pytest.raises(ValueError, match=re.escape("cannot run on 8 rank(s)")):
        check_config(load_config([*base, *argv]), 8)
    lines = problems([*base, *argv], 8)
    for name in ("eta", "dp_replicate", "batch_size", "sample_n_frames"):
        assert any(f" {name} " in line for line in lines)
    assert len(lines) == 4


@pytest.mark.parametrize("number", [0, 10**12])
def test_a_zero_that_would_divide_and_what_no_memory_holds_are_reported_as_numbers_out_of_range(base, number):
    names = ["batch_size", "num_generations", "grpo_sampling_steps", *(["sp_size"] if number == 0 else [])]
    lines = problems([*base, *(f"--{name}={number}" for name in names)])
    assert len(lines) == len(names)
    assert all(any(f"{name} is {number}, but must lie in" in line for line in lines) for name in names)


def test_a_drift_guard_needs_looks_shares_and_videos_from_before_training(base, tiny_root, tmp_path):
    assert any("drift_guard takes shares in (0, 1]" in line for line in problems([*base, "--drift_guard", "bordr=0.5"]))
    with pytest.raises(ValueError, match=r"expected a mapping.* \(a name stands there twice\)"):
        load_config([*base, "--drift_guard", "border=0.5", "border=0.8"])
    line = next(line for line in problems([*base, "--drift_guard", "border=1.5"]) if "drift_guard takes" in line)
    assert "received {'border': 1.5}" in line and "direction_x" in line
    needed = ["--validate_at_step0", "true", "--validation_interval", "5"]
    assert any("set validate_at_step0 true" in line for line in problems([*base, "--drift_guard", "border=0.5"]))
    assert problems([*base, *needed, "--drift_guard", "border=0.5", "motion=0.2"]) == []
    alike = write_prompts(tmp_path / "alike.csv", PROMPTS * 2)
    argv = arguments(tiny_root, alike, tmp_path / "out", validation_interval=5, validation_num_videos=8)
    with pytest.raises(ValueError, match="would compare 4 different validation prompts"):
        read_inputs(load_config([*argv, *needed[:2], "--drift_guard", "border=0.5"]))


DRIFTED = ["--infer_flow_shift_video", "9", "--grpo_sampling_steps", "50", "--sde_window", "first"]
"""At this shift the first step of sage_grpo lies wholly above its clamp, and 49 of 50 steps draw noise."""


def test_a_window_must_fit_the_steps_that_the_shift_leaves_noisy_before_a_model_is_loaded(base, tiny_root, tmp_path):
    assert problems([*base, *DRIFTED, "--sde_window_size", "49"]) == []
    csv = write_prompts(tmp_path / "prompts.csv")
    argv = [*arguments(tiny_root, csv, tmp_path / "out"), *DRIFTED, "--sde_window_size", "50"]
    with pytest.raises(ValueError, match=r"cannot run on 1 rank.*\n.*sde_window_size must lie within \[1, 49\]"):
        read_inputs(load_config(argv))  # the first thing that a run does
