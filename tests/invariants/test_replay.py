"""Replaying a rollout reproduces it: exactly for equal micro-batches, within documented bounds otherwise.

Both numbers are those that a run logs before the first update of a round: `ratio/max_deviation` is the largest
|ratio - 1|, `replay/mean_error` the largest |mean - rollout's mean| in units of the transition's std.
"""

from collections.abc import Callable

import pytest
import torch

from hyvideo.schedulers.scheduling_flow_match_discrete import SDE_TYPES
from hyvideo.training.trainer import Trainer
from tests.support.training import collect_round, pairs_of

SAMPLERS = [name for name in SDE_TYPES if name != "ode"]


def replay(trainer: Trainer) -> tuple[float, float]:
    """Roll out one round, make its update, and return (ratio/max_deviation, replay/mean_error) before it."""
    trajectory = collect_round(trainer)
    (pairs,) = pairs_of(trainer, trajectory)
    stats = trainer.update(trajectory, pairs, None, coefficient=0.0)
    return stats.ratio_deviation, stats.mean_error


@pytest.mark.parametrize("cfg_scale", [1.0, 4.0], ids=["unguided", "guided"])
@pytest.mark.parametrize("sde_type", SAMPLERS)
def test_equal_micro_batches_replay_exactly(make_trainer: Callable[..., Trainer], sde_type: str, cfg_scale: float):
    assert replay(make_trainer(sde_type=sde_type, cfg_scale=cfg_scale)) == (0.0, 0.0)


def test_an_adapter_replays_exactly(make_trainer: Callable[..., Trainer]):
    assert replay(make_trainer(use_lora=True)) == (0.0, 0.0)


@pytest.mark.parametrize(("rollout", "update"), [(1, 4), (0, 3)])
@pytest.mark.parametrize("sde_type", SAMPLERS)
def test_other_micro_batches_replay_to_rounding(
    make_trainer: Callable[..., Trainer], sde_type: str, rollout: int, update: int
):
    ratio_deviation, mean_error = replay(
        make_trainer(sde_type=sde_type, rollout_micro_batch_size=rollout, mini_batch_size_per_update=update)
    )
    assert mean_error <= 1e-4
    assert ratio_deviation <= 1e-5


@pytest.mark.parametrize("sde_type", SAMPLERS)
def test_half_precision_stays_inside_the_clip_range_for_equal_micro_batches(
    make_trainer: Callable[..., Trainer], sde_type: str
):
    """Only these: rounding to bf16 depends on the batch."""
    trainer = make_trainer(sde_type=sde_type, cfg_scale=4.0)
    trainer.update.pipeline.autocast_dtype = torch.bfloat16
    ratio_deviation, _ = replay(trainer)
    assert ratio_deviation <= trainer.config.grpo.clip_range / 10
