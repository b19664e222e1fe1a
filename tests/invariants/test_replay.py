"""Replaying a rollout reproduces it: exactly for equal micro-batches, within documented bounds otherwise.

Both numbers are those that a run logs before the first update of a round: `ratio/max_deviation` is the largest
|ratio - 1|, `replay/mean_error` the largest |mean - rollout's mean| in units of the transition's std.
"""

import pytest
import torch

from hyvideo.schedulers.scheduling_flow_match_discrete import SDE_TYPES
from hyvideo.training.run import Run
from tests.support.training import REPOSITORY, collect_round, flags_of, pairs_of, training_of, update

SAMPLERS = [name for name in SDE_TYPES if name != "ode"]


def replay(training: Run) -> tuple[float, float]:
    """Roll out one round, make its update, and return (ratio/max_deviation, replay/mean_error) before it."""
    trajectory = collect_round(training)
    (pairs,) = pairs_of(training, trajectory)
    metrics = update(training, trajectory, pairs)
    return metrics["ratio/max_deviation"], metrics["replay/mean_error"]


OTHERS = ({}, {"use_lora": True})


@pytest.mark.parametrize("settings", [*({"sde_type": name, "cfg_scale": 4.0} for name in SAMPLERS), *OTHERS], ids=str)
def test_equal_micro_batches_replay_exactly(make_training, settings: dict):
    assert replay(make_training(**settings)) == (0.0, 0.0)


@pytest.mark.parametrize(("sde_type", "rollout", "replayed"), [*((one, 1, 4) for one in SAMPLERS), (SAMPLERS[0], 0, 3)])
def test_other_micro_batches_replay_to_rounding(make_training, sde_type: str, rollout: int, replayed: int):
    sizes = {"rollout_micro_batch_size": rollout, "mini_batch_size_per_update": replayed}
    ratio_deviation, mean_error = replay(make_training(sde_type=sde_type, **sizes))
    assert mean_error <= 1e-4 and ratio_deviation <= 1e-5


@pytest.mark.parametrize("sde_type", SAMPLERS)
def test_half_precision_stays_inside_the_clip_range_for_equal_micro_batches(make_training, sde_type):
    """Only these: rounding to bf16 depends on the batch."""
    training = make_training(sde_type=sde_type, cfg_scale=4.0)
    training.policy.pipeline.autocast_dtype = torch.bfloat16
    ratio_deviation, _ = replay(training)
    assert ratio_deviation <= training.config.grpo.clip_range / 10


def test_the_bundled_model_in_its_own_configuration_starts_without_a_warning_and_replays_exactly(tmp_path):
    """In fewer videos and steps per round, and the videos are not decoded."""
    tiny, config = REPOSITORY / "assets" / "tiny", REPOSITORY / "configs" / "tiny.yaml"
    prompts = tiny / "prompts" / "train.csv"
    settings = {"config": config, "pretrained_model_root": tiny, "train_video_csv": prompts, "valid_video_csv": prompts}
    settings |= {"output_dir": tmp_path / "run", "batch_size": 16, "grpo_sampling_steps": 6}
    training = training_of(flags_of(settings))
    log = (training.folder.path / "console.log").read_text()
    assert "run folder" in log and "WARNING" not in log
    blank = torch.zeros(1, training.config.rollout.sample_n_frames, 64, 64, 3, dtype=torch.uint8)
    training.policy.pipeline.decode = lambda latents: blank.expand(len(latents), -1, -1, -1, -1)
    assert replay(training) == (0.0, 0.0)
