"""The deciding fields tell apart what trains differently, and nothing else."""

import pytest

from hyvideo.config.knobs import deciding_fields
from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config, RolloutConfig


@pytest.mark.parametrize(
    "argv",
    [
        ["--eta", "0.6"],
        ["--learning_rate", "2e-5"],
        ["--seed", "43"],
        ["--batch_size", "4"],
        ["--kl_weight", "0"],
        ["--reward_weights", '{"TA": 1}'],
        ["--reward_config", '{"models": {}}'],
        ["--reward_aggregation", "normalize_then_sum"],
        ["--reward_io", "memory"],
        ["--train_video_csv", "other.csv"],
        ["--use_lora"],
        ["--sde_window", "sliding"],
        ["--timestep_stride"],
    ],
)
def test_what_decides_the_result_is_a_deciding_field(argv):
    assert deciding_fields(load_config(argv)) != deciding_fields(load_config([]))


@pytest.mark.parametrize(
    "argv",
    [
        ["--output_dir", "elsewhere", "--run_name", "other", "--resume_from_checkpoint", "latest"],
        ["--max_steps", "7", "--save_interval", "1", "--log_interval", "5", "--keep_last", "1"],
        ["--validation_interval", "0", "--valid_video_csv", "v.csv", "--validate_at_step0"],
        ["--sp_size", "4", "--dp_replicate", "2", "--enable_fsdp", "no"],
        ["--remote_reward_url", "http://other:8000", "--reference_mode_offload"],
        ["--profile", "--profile_steps", "5", "--peak_tflops", "900"],
        ["--reward_async", "--reward_offload", "--reward_max_failed", "0.1", "--remote_reward_timeout", "9"],
    ],
)
def test_what_leaves_the_result_alone_is_none(argv):
    assert deciding_fields(load_config(argv)) == deciding_fields(load_config([]))


def test_a_run_may_go_on_over_other_ranks_with_as_many_videos():
    two, four = (load_config(["--batch_size", size]) for size in ("2", "4"))
    assert deciding_fields(two, dp_size=4) == deciding_fields(four, dp_size=2)
    assert deciding_fields(two, dp_size=4) != deciding_fields(two, dp_size=2)
    assert deciding_fields(two, dp_size=4)["batch_size"] == 8


def test_how_a_number_was_written_does_not_matter():
    written = Config(rollout=RolloutConfig(cfg_scale=6, eta=0.50))
    assert deciding_fields(written) == deciding_fields(Config()) == deciding_fields(load_config(["--cfg_scale", "6"]))
