"""A replay that does not repeat its rollout is measured, is told or stops the run, and cannot bend a first update."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hyvideo.algorithms.algorithm import Trajectory
from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.data.prompts import Prompt
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.training.guard import ReplayWatch
from hyvideo.training.run import Run
from tests.support.training import GradientRecorder, collect_round


@contextmanager
def another_text_layer(training: Run, trajectory: Trajectory) -> Iterator[Trajectory]:
    del training.policy.pipeline.text_encoder.layers[-1]
    rows = dict(zip(trajectory.conditioning_rows, trajectory.prompts, strict=True))
    conditioning = training.policy.encode([Prompt(rows[row], row, None, None) for row in range(len(rows))])
    yield replace(trajectory, conditioning=conditioning)


@contextmanager
def a_stale_policy(training: Run, trajectory: Trajectory) -> Iterator[Trajectory]:
    moved = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trainable_parameters(training.policy.transformer).values():
            weight.add_(0.05 * weight.abs().mean() * torch.randn(weight.shape, generator=moved))
    yield trajectory


@contextmanager
def another_attention_kernel(training: Run, trajectory: Trajectory) -> Iterator[Trajectory]:
    with sdpa_kernel(SDPBackend.MATH):
        yield trajectory


def gradient(training: Run, trajectory: Trajectory, *, on_policy: bool) -> tuple[Tensor, dict[str, float]]:
    """The gradient of a round's first update, and its metrics; no weight is changed."""
    algorithm = training.algorithm
    recorder = GradientRecorder(training)
    compared = replace(algorithm.compare(trajectory), anchor_means=trajectory.rollout.means)
    metrics = algorithm.update(compared, compared.updates[0], 0.0, on_policy=on_policy)
    return recorder.gradient, metrics


@pytest.mark.parametrize(
    ("mismatch", "deviation", "on_policy", "by_recorded"),
    [
        (another_text_layer, (0.05, 0.5), 0.9, 0.85),
        (a_stale_policy, (0.01, 0.2), 0.98, 0.9),
        (another_attention_kernel, (0.0, 1e-5), 0.999, 1.1),
    ],
)
def test_the_ratio_shows_a_mismatch_and_the_first_updates_gradient_keeps_its_direction(
    make_training, mismatch, deviation, on_policy, by_recorded
):
    """Cosines with the gradient of a faithful replay. The clip by recorded ratios silences pairs before any step."""
    training = make_training(clip_range=1e-4)
    trajectory = collect_round(training)
    faithful, metrics = gradient(training, trajectory, on_policy=True)
    assert metrics["ratio/max_deviation"] == 0
    with mismatch(training, trajectory) as replayed:
        ours, metrics = gradient(training, replayed, on_policy=True)
        clipped, _ = gradient(training, replayed, on_policy=False)
    assert deviation[0] <= metrics["ratio/max_deviation"] < deviation[1]
    assert metrics["clip_fraction"] == 0
    assert on_policy < torch.cosine_similarity(faithful, ours, dim=0)
    assert torch.cosine_similarity(faithful, clipped, dim=0) < by_recorded


def test_a_first_update_is_on_policy_and_later_ones_are_not(make_training):
    training = make_training(updates_per_rollout=2, clip_range=1e-6, learning_rate=1e-4)
    first, second = training.algorithm.updates(collect_round(training))
    assert first["clip_fraction"] == 0 == first["kl/velocity"]
    assert second["clip_fraction"] > 0 != second["kl/velocity"]


def config_of(**changed: object) -> Config:
    config = load_config(["--config", "configs/tiny.yaml", "--batch_size", "8"])
    config.rollout.rollout_micro_batch_size = config.grpo.mini_batch_size_per_update = 4
    for name, value in changed.items():
        setattr(next(group for group in vars(config).values() if hasattr(group, name)), name, value)
    return config


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"mini_batch_size_per_update": 1}, "the rollout computes 4 videos together and the update 1"),
        ({}, "The settings do not explain it"),
    ],
)
def test_a_mismatch_is_told_once_with_its_likely_cause(changed, cause):
    watch = ReplayWatch(config_of(**changed))
    assert watch.observe({"ratio/max_deviation": 1e-4}) is None  # the clip range itself
    told = watch.observe({"ratio/max_deviation": 2e-3})
    assert "ratio/max_deviation is 2.0e-03" in told
    assert "clip_range 0.0001" in told
    assert cause in told
    assert watch.observe({"ratio/max_deviation": 2e-3}) is None


def test_an_algorithm_without_ratios_is_not_watched():
    assert ReplayWatch(config_of()).observe({"loss/total": 1.0}) is None


def test_a_run_warns_once_and_goes_on(make_training, capsys):
    training = make_training(rollout_micro_batch_size=1, max_steps=2)
    training.policy.pipeline.autocast_dtype = torch.bfloat16
    training.train()
    assert training.state.step == 2
    assert capsys.readouterr().err.count("ratio/max_deviation is") == 1
