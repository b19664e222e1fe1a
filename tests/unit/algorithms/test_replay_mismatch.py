"""A replay that does not repeat its rollout cannot bend a first update, and equal rewards change nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from hyvideo.algorithms.algorithm import Trajectory, over_micro_batches
from hyvideo.config.loading import load_config
from hyvideo.data.prompts import Prompt
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.models.reward_models.rewards import Scores
from hyvideo.observability.metrics import read_metrics
from hyvideo.training.guard import ReplayWatch
from hyvideo.training.run import Run
from tests.support.ranks import run_on_ranks
from tests.support.rewards import scoring_with
from tests.support.training import ALGORITHMS, GradientRecorder, collect_round, pairs_of, update, weights_of


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
    ("mismatch", "deviation", "ours", "recorded"),
    [
        (another_text_layer, (0.05, 0.5), 0.9, 0.85),
        (a_stale_policy, (0.01, 0.2), 0.98, 0.9),
        (another_attention_kernel, (0.0, 1e-5), 0.999, 1.1),
    ],
)
def test_the_ratio_shows_it_and_the_first_gradient_keeps_its_way(make_training, mismatch, deviation, ours, recorded):
    """Cosines with the gradient of a faithful replay. The clip by recorded ratios silences pairs before any step."""
    training = make_training(clip_range=1e-4)
    trajectory = collect_round(training)
    faithful, metrics = gradient(training, trajectory, on_policy=True)
    assert metrics["ratio/max_deviation"] == 0
    with mismatch(training, trajectory) as replayed:
        on_policy, metrics = gradient(training, replayed, on_policy=True)
        clipped, _ = gradient(training, replayed, on_policy=False)
    assert deviation[0] <= metrics["ratio/max_deviation"] < deviation[1]
    assert metrics["clip_fraction"] == 0
    assert ours < torch.cosine_similarity(faithful, on_policy, dim=0)
    assert torch.cosine_similarity(faithful, clipped, dim=0) < recorded


@pytest.mark.parametrize(
    ("replayed", "cause"),
    [(1, "the rollout computes 4 videos together and the update 1"), (4, "The settings do not explain it")],
)
def test_a_mismatch_is_told_once_with_its_likely_cause(replayed, cause):
    config = load_config(["--config", "configs/tiny.yaml", "--batch_size", "8"])
    config.rollout.rollout_micro_batch_size, config.grpo.mini_batch_size_per_update = 4, replayed
    watch = ReplayWatch(config)
    assert watch.observe({"loss/total": 1.0}) is None  # an algorithm without ratios
    assert watch.observe({"ratio/max_deviation": 1e-4}) is None  # the clip range itself
    told = watch.observe({"ratio/max_deviation": 2e-3})
    assert all(part in told for part in ("ratio/max_deviation is 2.0e-03", "clip_range 0.0001", cause))
    assert watch.observe({"ratio/max_deviation": 2e-3}) is None


def test_a_run_warns_once_and_goes_on_and_only_its_first_updates_are_on_policy(make_training, capsys):
    training = make_training(rollout_micro_batch_size=1, max_steps=2)
    training.policy.pipeline.autocast_dtype = torch.bfloat16
    training.train()
    assert training.state.step == 2
    assert capsys.readouterr().err.count("ratio/max_deviation is") == 1
    training = make_training(updates_per_rollout=2, clip_range=1e-6, learning_rate=1e-4)
    first, second = training.algorithm.updates(collect_round(training))
    assert first["clip_fraction"] == 0 == first["kl/velocity"]
    assert second["clip_fraction"] > 0 != second["kl/velocity"]


Make = Callable[..., Run]
EAGER = {"use_muon": True, "weight_decay": 0.1, "lr_warmup_steps": 0, "updates_per_rollout": 2, "base_interval": 0}


def learnt(training: Run) -> list[Any]:
    """Everything that an update may change, but the number of updates: numbers, and tensors as bytes."""
    optimization, algorithm = training.algorithm.optimization, training.algorithm
    moments = [optimizer.state_dict()["state"] for optimizer in optimization.optimizers]
    state = [weights_of(training), moments, optimization.ema.state_dict(), algorithm.tensors(), algorithm.facts()]
    return [part.numpy().tobytes() if isinstance(part, Tensor) else part for part in tree_leaves(state)]


def only_the_first_round_differs(training: Run) -> None:
    """Score the videos of every later round alike."""
    told, rounds = training.reward, iter(range(9))

    def score(videos: Tensor, prompts: list[str]) -> Scores:
        scores = told(videos, prompts)
        if next(rounds) == 0:
            return scores
        same = {name: torch.full_like(values, 0.3) for name, values in scores.metrics.items()}
        return Scores(same, torch.full_like(scores.total, 0.3), scores.weights)

    training.reward = scoring_with(training.reward, score)


@pytest.mark.parametrize("settings", ALGORITHMS.values(), ids=ALGORITHMS)
def test_equal_scores_move_neither_weights_nor_moments_average_anchor_or_controller(make_training, settings):
    """The round before moved them, so that a KL, momentum and decay have something to act on."""
    training = make_training(**{**settings, **EAGER, "max_steps": 4})
    only_the_first_round_differs(training)
    start = weights_of(training)
    training.config.run.max_steps = 2
    training.train()
    before = learnt(training)
    assert any(not torch.equal(start[name], value) for name, value in weights_of(training).items())
    training.config.run.max_steps = 4
    training.algorithm.anchor.refresh = lambda *_: None  # the anchor's own schedule goes on
    training.train()
    assert learnt(training) == before
    rows = read_metrics(training.folder.path / "metrics.jsonl")
    assert [row["update/without_signal"] for row in rows] == [0, 0, 1, 1]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and training.algorithm.optimization.updates == 4
    assert rows[1]["advantage/largest"] > 0 == rows[2]["advantage/largest"]
    log = (training.folder.path / "console.log").read_text()
    assert "Update 3 left the weights as they were" in log and "Update 2 left" not in log


def test_the_velocity_term_has_no_gradient_in_a_rounds_first_update(make_training):
    """There its value is 0 and its gradient the sampled noise, however large its weight."""
    gradients = {}
    for weight in (0.0, 1e6):
        training = make_training(use_dual_kl=True, dual_kl_step_weight=weight, kl_schedule="fixed")
        trajectory, recorder = collect_round(training), GradientRecorder(training)
        compared = training.algorithm.compare(trajectory)
        metrics = training.algorithm.update(compared, compared.updates[0], 1.0, on_policy=True)
        gradients[weight] = recorder.gradient
        assert metrics["kl/velocity"] == 0
        update(training, trajectory, pairs_of(training, trajectory)[0], trajectory.rollout.means, 1.0)
        gradients["later", weight] = recorder.gradient
    assert torch.equal(gradients[0.0], gradients[1e6])
    assert not torch.equal(gradients["later", 0.0], gradients["later", 1e6])


def largest_on(ranks_advantage: list[float]) -> float:
    numbers = {"advantage/largest": torch.tensor(ranks_advantage[torch.distributed.get_rank()])}
    return over_micro_batches([numbers], [1.0], largest={"advantage/largest"})["advantage/largest"]


def test_a_signal_on_any_rank_is_a_signal_for_all():
    assert run_on_ranks(2, largest_on, [0.0, 1.5]) == [1.5, 1.5]
