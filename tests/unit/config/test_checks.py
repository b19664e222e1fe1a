"""Rules over the whole configuration: found before anything is built, all at once, with numbers and a way on."""

import re

import pytest

from hyvideo.config.checks import check_config
from hyvideo.config.loading import load_config
from hyvideo.grpo.kl_controller import MILDER_CEILING


@pytest.fixture
def base(tmp_path):
    """Flags of a configuration that passes on one rank."""
    csv = tmp_path / "prompts.csv"
    csv.write_text("prompt\na cat\n")
    return ["--batch_size", "4", "--train_video_csv", str(csv), "--valid_video_csv", str(csv)]


def problems(argv, world_size=1, **vae):
    """The lines of the error, or none."""
    try:
        check_config(load_config(argv), world_size, **vae)
    except ValueError as error:
        return str(error).splitlines()[1:]
    return []


def only_problem(argv, world_size=1):
    """The one line of the error."""
    (line,) = problems(argv, world_size)
    return line


def test_the_base_passes(base):
    assert problems(base) == []


@pytest.mark.parametrize(
    ("argv", "world_size"),
    [
        (["--sp_size", "2", "--batch_size", "2"], 8),
        (["--sp_size", "2", "--batch_size", "2"], 64),
        (["--batch_size", "1"], 4),  # a group over four ranks
        (["--batch_size", "8"], 3),  # two groups per rank
        (["--sp_size", "2", "--batch_size", "2", "--dp_replicate", "4"], 16),
    ],
)
def test_groups_may_span_ranks_or_share_one(base, argv, world_size):
    assert problems([*base, *argv], world_size) == []


@pytest.mark.parametrize(
    ("argv", "world_size", "parts"),
    [
        (["--sp_size", "2", "--use_lora", "--lora_target_modules", "proj_out"], 8, ["has proj_out", "(sp_size 2)"]),
        (["--sp_size", "3"], 8, ["world size 8", "sp_size 3", "1, 2, 4, 8"]),
        (["--sp_size", "2", "--dp_replicate", "3"], 16, ["degree 8", "16 / sp_size 2", "dp_replicate 3", "1, 2, 4, 8"]),
        (
            ["--sp_size", "8", "--batch_size", "2"],
            8,
            ["batch_size 2 x 1", "8 / sp_size 8", "= 2 videos", "num_generations 4"],
        ),
        (["--batch_size", "6"], 2, ["batch_size 6", "num_generations 4", "multiple of 4", "1, 2, 4"]),
        (["--batch_size", "2"], 3, ["batch_size 2 x 3", "= 6 videos", "num_generations 4"]),
    ],
)
def test_ranks_that_do_not_divide_are_named_with_all_numbers(base, argv, world_size, parts):
    line = only_problem([*base, *argv], world_size)
    assert [part for part in parts if part not in line] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sample_n_frames", "80"], "sample_n_frames is 80, but must be 4n + 1: use 77 or 81"),
        (["--validate_video_length", "2"], "validate_video_length is 2, but must be 4n + 1: use 1 or 5"),
        (["--rollout_size", "350x624"], "rollout_size is 350x624, but height and width must be multiples of 16"),
        (["--rollout_size", "350x624"], "use 352x624"),
        (["--rollout_size", "4x624"], "use 16x624"),
        (["--validation_fixed_size", "480p"], "validation_fixed_size: a size is HEIGHTxWIDTH in pixels"),
        (["--cfg_scale", "1", "--negative_prompt", "blurry"], "negative_prompt is 'blurry', but cfg_scale 1.0"),
        (["--sde_type", "cps", "--eta", "1.5"], "eta is 1.5, but sde_type cps"),
        (["--sde_type", "cps", "--grpo_sampling_steps", "1"], "use at least 2 steps"),
        (
            ["--updates_per_rollout", "81"],
            "updates_per_rollout is 81, but a rank has batch_size 4 x gradient_accumulation_steps 1 x 20",
        ),
        (["--updates_per_rollout", "77", "--sde_type", "cps"], "19 trained steps = 76"),
        (["--updates_per_rollout", "41", "--timestep_fraction", "0.5"], "10 trained steps = 40"),
        (["--kl_min_coef", "1e-4"], "kl_min_coef 0.0001, kl_coef 0.0001 and the ceiling 1e-05"),
        (["--kl_coef", "1e-3"], "kl_min_coef 1e-07, kl_coef 0.001 and the ceiling 1e-05"),
        (["--kl_schedule", "milder", "--kl_weight", "9e-7"], f"and the ceiling {9e-7 * MILDER_CEILING:g}"),
        (["--dual_kl_moving_weight", "0", "--dual_kl_step_weight", "0"], "dual_kl_step_weight are both 0"),
        (["--reward_weights", "{}"], "reward_weights needs at least one metric"),
        (["--reward_weights", '{"VQ": 0}'], "reward_weights needs at least one metric"),
        (["--reward_weights", '{"VQ": NaN}'], "reward_weights must be finite"),
        (["--remote_reward_url", "localhost:8000"], "must begin with http:// or https://"),
        (["--remote_reward_url", "http://a", "--reward_checkpoint_path", "b"], "but nothing would load it"),
        (["--reward_max_failed", "1.1"], "reward_max_failed is 1.1, but must lie in [0, 1]"),
        (["--train_video_csv", "no.csv"], "train_video_csv: there is no file 'no.csv'"),
        (["--valid_video_csv", "no.csv"], "valid_video_csv: there is no file 'no.csv'"),
        (["--lora_dropout", "0.1"], "lora_dropout is 0.1, but must lie in [0, 0]"),
        (["--dtype", "fp32", "--master_weight_type", "bf16"], "set both to one of them"),
        (["--pretrained_lora_path", "."], "use_lora is false and nothing would load it"),
        (["--use_lora", "--pretrained_lora_path", "no/adapter"], "there is no folder 'no/adapter'"),
        (["--resume_from_checkpoint", "no/step_3"], "there is no checkpoint 'no/step_3'"),
        (["--resume_may_change", "eta", "lr"], "resume_may_change: 'lr' is not a setting; the nearest is 'lora_r'"),
        (["--run_name", "../escape"], "run_name must be one folder name"),
        (["--output_dir="], "output_dir is empty"),
        (["--cpu_offload"], "cpu_offload is True, but one process has no shards"),
        (["--cpu_offload", "--enable_fsdp", "no"], "cpu_offload is True, but nothing is sharded: set enable_fsdp"),
        (["--learning_rate", "inf"], "learning_rate is inf, but must lie in (0, inf)"),
    ],
)
def test_a_broken_rule_says_what_was_received_and_what_to_do(base, argv, message):
    assert message in only_problem([*base, *argv])


@pytest.mark.parametrize(
    "argv",
    [
        ["--updates_per_rollout", "160", "--gradient_accumulation_steps", "2"],
        ["--timestep_fraction", "1"],
        ["--resume_from_checkpoint", "latest"],
        ["--sde_type", "cps"],
        ["--sde_type", "flow_grpo", "--grpo_sampling_steps", "1"],
    ],
)
def test_values_at_the_edge_pass(base, argv):
    assert problems([*base, *argv]) == []


def test_without_kl_weight_nothing_else_of_the_trust_region_matters(base):
    argv = ["--kl_weight", "0", "--kl_min_coef", "1", "--dual_kl_moving_weight", "0", "--dual_kl_step_weight", "0"]
    assert problems([*base, *argv]) == []


@pytest.mark.parametrize(
    "server",
    [
        ["--remote_reward_url", "http://a"],
        ["--reward_config", '{"models": {"x": {"sub_reward": {"x": 1}}, "y": {"url": "http://a"}}}'],
        ["--remote_reward_url", "http://a", "--reward_config", '{"models": {"x": {"sub_reward": {"x": 1}}}}'],
    ],
)
def test_ranks_wait_longer_for_each_other_than_one_waits_for_a_server(base, server):
    slow = [*base, *server, "--remote_reward_timeout", "600"]
    line = only_problem(slow, 2)
    assert "remote_reward_timeout 600 and remote_reward_retries 3" in line and "2403.5 s" in line
    assert "collective_timeout 1800 s" in line
    assert problems([*slow, "--collective_timeout", "2404"], 2) == problems([*base, *server], 2) == []
    assert problems(slow) == []  # nobody waits for one process
    patient = [*base, *server, "--remote_reward_timeout", "5", "--remote_reward_retries"]
    assert "wait 2112.5 s" in only_problem([*patient, "12"], 2) and problems([*patient, "9"], 2) == []
    many = [*base, *server, "--validation_num_videos"]
    assert problems([*many, "64"], 2) == [] and "wait 2407 s" in only_problem([*many, "65"], 2)
    assert problems([*many, "65", "--validation_interval", "0"], 2) == []
    assert problems([*many, "128", "--sp_size", "2"], 4) == problems([*many, "65", "--reward_batch_size", "9"], 2) == []
    accumulated = [*base, *server, "--validation_interval", "0", "--gradient_accumulation_steps"]
    assert problems([*accumulated, "8"], 2) == [] and "wait 2407 s" in only_problem([*accumulated, "9"], 2)
    assert "collective_timeout" in only_problem([*patient, str(2**63)], 2)


@pytest.mark.parametrize(
    "reward",
    [
        [],
        ["--remote_reward_url", "http://a", "--reward_config", '{"models": {"x": {"url": null}}}'],
        ["--reward_config", '{"models": {"x": {}}}'],
        ["--reward_config", '{"models": {"x": 3}}'],
        ["--reward_config", '{"models": 3}'],
    ],
)
def test_without_a_server_its_timeout_matters_to_nobody(base, reward):
    assert problems([*base, *reward, "--remote_reward_timeout", "9999"], 2) == []


def test_without_validation_no_validation_prompts_are_needed(base):
    off = [*base[:4], "--validation_interval", "0"]
    assert problems(off) == []
    assert "valid_video_csv is empty" in only_problem(base[:4])
    assert "valid_video_csv is empty" in only_problem([*off, "--validate_at_step0"])


def test_without_training_prompts_nothing_runs(base):
    assert "train_video_csv is empty" in only_problem([*base[:2], *base[4:]])


def test_the_factors_are_those_of_the_vae_in_use(base):
    argv = [*base, "--sample_n_frames", "9", "--rollout_size", "24x40"]
    assert problems(argv, vae_spatial=8, vae_temporal=8) == []
    assert len(problems(argv, vae_spatial=16, vae_temporal=8)) == 1
    assert len(problems(argv, vae_spatial=8, vae_temporal=16)) == 1


def test_all_problems_come_in_one_error(base):
    argv = ["--sp_size", "3", "--eta", "0", "--sample_n_frames", "80", "--cfg_scale", "1", "--negative_prompt", "x"]
    with pytest.raises(ValueError, match=re.escape("cannot run on 8 rank(s)")):
        check_config(load_config([*base, *argv]), 8)
    lines = problems([*base, *argv], 8)
    assert [
        any(f" {name} " in line for line in lines) for name in ("sp_size", "eta", "sample_n_frames", "cfg_scale")
    ] == [True] * 4
    assert len(lines) == 4


def test_a_zero_that_would_divide_is_reported_as_a_number_out_of_range(base):
    lines = problems(
        [*base, "--sp_size", "0", "--batch_size", "0", "--num_generations", "0", "--grpo_sampling_steps", "0"]
    )
    assert len(lines) == 4 and all("must lie in" in line for line in lines)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--sde_window", "first", "--sde_window_size", "21"], ["sde_window_size is 21", "20 of 20"]),
        (["--sde_window", "sliding", "--sde_window_size", "20", "--sde_type", "cps"], ["is 20", "19 of 20"]),
        (
            ["--sde_window", "per_group", "--sde_window_size", "1", "--updates_per_rollout", "5"],
            ["updates_per_rollout is 5", "1 trained steps = 4"],
        ),
    ],
)
def test_a_window_must_fit_the_steps_and_the_updates_the_window(base, argv, parts):
    line = only_problem([*base, *argv])
    assert all(part in line for part in parts)


def test_a_window_that_is_not_used_may_be_any_size(base):
    assert problems([*base, "--grpo_sampling_steps", "3"]) == []
