"""Cheaper variants of the method: noise and training in a part of the steps, the ODE in the others."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyvideo.observability.metrics import read_metrics
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Rollout
from hyvideo.planning.evaluations import evaluations_per_video
from hyvideo.training import run as training_run
from hyvideo.training.run import Training

NUM_STEPS, NUM_VIDEOS = 4, 4
VARIANTS = {
    "first steps": {"sde_window": "first", "sde_window_size": 2},
    "sliding": {"sde_window": "sliding", "sde_window_size": 2, "sde_window_interval": 1},
    "one step per group": {"sde_window": "per_group", "sde_window_size": 1, "use_same_noise": True},
    "half of the steps": {"timestep_fraction": 0.5},
    "stride": {"timestep_stride": True, "timestep_fraction": 0.5},
}


@pytest.fixture
def rounds(make_training: Callable[..., Training], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple]:
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
        return rollouts, counts, read_metrics(training.run.folder.path / "metrics.jsonl")

    return run


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_the_cost_is_what_the_formula_says_and_the_replay_is_exact(rounds: Callable[..., tuple], settings: dict):
    _, counts, rows = rounds(**settings)
    window = settings.get("sde_window_size")
    for count, differs in zip(counts, (False, True), strict=True):
        cost = evaluations_per_video(
            NUM_STEPS,
            NUM_STEPS,
            window_size=window,
            timestep_fraction=settings.get("timestep_fraction", 1.0),
            with_anchor=differs,
        )
        assert count["rollout"] == NUM_VIDEOS * cost.rollout
        assert count["evaluations"] == NUM_VIDEOS * (cost.anchor + cost.update)
    assert {row["ratio/max_deviation"] for row in rows} == {row["replay/mean_error"] for row in rows} == {0.0}
    assert all(row["grad_norm"] > 0 for row in rows)


def noisy_steps_of(rollout: Rollout) -> torch.Tensor:
    """Which transitions `[B, K]` left their mean."""
    return (rollout.latents[:, 1:] != rollout.means).flatten(2).any(2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (VARIANTS["first steps"], [[True, True, False, False]] * 2),
        (VARIANTS["sliding"], [[True, True, False, False], [False, True, True, False]]),
    ],
    ids=["first steps", "sliding"],
)
def test_noise_falls_into_the_window_alone(rounds: Callable[..., tuple], settings: dict, expected: list):
    rollouts, _, _ = rounds(**settings)
    for rollout, steps in zip(rollouts, expected, strict=True):
        assert noisy_steps_of(rollout).tolist() == [steps] * NUM_VIDEOS
        assert not rollout.log_probs[:, ~torch.tensor(steps)].any()


def test_videos_of_a_group_are_one_until_their_step_and_then_part(rounds: Callable[..., tuple]):
    rollouts, _, _ = rounds(**VARIANTS["one step per group"], seed=1)
    for rollout in rollouts:
        noisy = noisy_steps_of(rollout)
        assert noisy.sum(1).tolist() == [1] * NUM_VIDEOS
        for first in range(0, NUM_VIDEOS, 2):
            step = int(noisy[first].nonzero())
            assert noisy[first].equal(noisy[first + 1])
            assert torch.allclose(rollout.latents[first, : step + 1], rollout.latents[first + 1, : step + 1])
            assert not torch.allclose(rollout.latents[first, step + 1 :], rollout.latents[first + 1, step + 1 :])


def test_a_window_of_all_steps_is_no_window(rounds: Callable[..., tuple]):
    whole, _, rows = rounds(sde_window="first", sde_window_size=NUM_STEPS)
    plain, _, expected = rounds()
    for rollout, reference in zip(whole, plain, strict=True):
        assert torch.equal(rollout.latents, reference.latents)
    assert [row["loss/total"] for row in rows] == [row["loss/total"] for row in expected]
