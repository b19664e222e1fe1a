"""Cheaper variants of the method: noise and training in a part of the steps, the ODE in the others."""

from collections import Counter
from typing import Any

import pytest
import torch

from hyvideo.algorithms.grpo import GRPO
from hyvideo.config.loading import load_config
from hyvideo.observability.metrics import read_metrics
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Rollout
from hyvideo.training import run as training_run
from tests.support.training import SETTINGS, flags_of

NUM_STEPS, NUM_VIDEOS = 4, 4
VARIANTS = {
    "first steps": {"sde_window": "first", "sde_window_size": 2},
    "sliding": {"sde_window": "sliding", "sde_window_size": 2, "sde_window_interval": 1},
    "one step per group": {"sde_window": "per_group", "sde_window_size": 1, "use_same_noise": True},
    "half of the steps": {"timestep_fraction": 0.5},
}


@pytest.fixture
def rounds(make_training, monkeypatch: pytest.MonkeyPatch):
    """Train two rounds; return the rollouts, the evaluations (of one video each) and the rows of metrics."""

    def run(**settings: Any) -> tuple[list[Rollout], list[Counter], list[dict[str, float]]]:
        rollouts, counts = [], []
        training = make_training(max_steps=2, update_ref_model_step=100, **settings)
        collect = training_run.collect

        def spy(*args: Any, **kwargs: Any) -> Any:
            counts.append(Counter())
            trajectory = collect(*args, **kwargs)
            rollouts.append(trajectory.rollout)
            counts[-1]["rollout"] = counts[-1].pop("evaluations")
            return trajectory

        monkeypatch.setattr(training_run, "collect", spy)
        training.policy.pipeline.transformer.register_forward_hook(
            lambda module, args, output: counts[-1].update(evaluations=len(output[0]))
        )
        training.train()
        monkeypatch.setattr(training_run, "collect", collect)
        return rollouts, counts, read_metrics(training.folder.path / "metrics.jsonl")

    return run


def noisy_steps_of(rollout: Rollout) -> torch.Tensor:
    """Which transitions `[B, K]` left their mean."""
    return (rollout.latents[:, 1:] != rollout.means).flatten(2).any(2)


BEGINS, THEN = [True, True, False, False], [False, True, True, False]
NOISY = {"first steps": [BEGINS, BEGINS], "sliding": [BEGINS, THEN]}
"""Which steps of the two rounds are in the window."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cost_is_what_the_formula_says_the_replay_exact_and_noise_in_the_window_alone(rounds, variant):
    settings = VARIANTS[variant]
    rollouts, counts, rows = rounds(**settings)
    for rollout, steps in zip(rollouts, NOISY.get(variant, ()), strict=False):
        assert noisy_steps_of(rollout).tolist() == [steps] * NUM_VIDEOS
        assert not rollout.log_probs[:, ~torch.tensor(steps)].any()
    cost = GRPO.evaluations(load_config(flags_of({**SETTINGS, **settings})))
    for count, anchor in zip(counts, (0, cost.anchor), strict=True):  # in the first round the anchor is the policy
        assert count["rollout"] == NUM_VIDEOS * cost.rollout
        assert count["evaluations"] == NUM_VIDEOS * (anchor + cost.update)
    assert {row["ratio/max_deviation"] for row in rows} == {row["replay/mean_error"] for row in rows} == {0.0}
    assert all(row["grad_norm"] > 0 for row in rows)


def test_videos_of_a_group_are_one_until_their_step_and_then_part(rounds):
    rollouts, _, _ = rounds(**VARIANTS["one step per group"], seed=1)
    for rollout in rollouts:
        noisy = noisy_steps_of(rollout)
        assert noisy.sum(1).tolist() == [1] * NUM_VIDEOS
        for first in range(0, NUM_VIDEOS, 2):
            step = int(noisy[first].nonzero())
            assert noisy[first].equal(noisy[first + 1])
            assert torch.allclose(rollout.latents[first, : step + 1], rollout.latents[first + 1, : step + 1])
            assert not torch.allclose(rollout.latents[first, step + 1 :], rollout.latents[first + 1, step + 1 :])


@pytest.mark.parametrize("sde_type", ["sage_grpo", "cps"])
def test_a_normalized_ratio_starts_at_1_and_the_later_update_of_a_round_leaves_it(rounds, sde_type):
    settings = {"ratio_norm": True, "clip_range": 1e-4, "clip_range_high": 2e-4, "advantage_std": "global"}
    _, _, rows = rounds(updates_per_rollout=2, sde_type=sde_type, **settings)
    assert [row["clip_fraction"] > 0 for row in rows] == [False, True]
    assert all(row["grad_norm"] > 0 for row in rows)
