"""Where no video's reward differs from its group's, an update is counted and changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hyvideo.algorithms.algorithm import over_micro_batches
from hyvideo.models.reward_models.rewards import Scores
from hyvideo.observability.metrics import read_metrics
from hyvideo.training.run import Run
from tests.support.ranks import run_on_ranks
from tests.support.rewards import scoring_with
from tests.support.training import ALGORITHMS, GradientRecorder, collect_round, pairs_of, update, weights_of

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
        trajectory = collect_round(training)
        recorder = GradientRecorder(training)
        compared = training.algorithm.compare(trajectory)
        metrics = training.algorithm.update(compared, compared.updates[0], 1.0, on_policy=True)
        gradients[weight] = recorder.gradient
        assert metrics["kl/velocity"] == 0
        first = pairs_of(training, trajectory)[0]
        update(training, trajectory, first, trajectory.rollout.means, 1.0)
        gradients["later", weight] = recorder.gradient
    assert torch.equal(gradients[0.0], gradients[1e6])
    assert not torch.equal(gradients["later", 0.0], gradients["later", 1e6])


def largest_on(ranks_advantage: list[float]) -> float:
    rank = torch.distributed.get_rank()
    numbers = {"advantage/largest": torch.tensor(ranks_advantage[rank])}
    return over_micro_batches([numbers], [1.0], largest={"advantage/largest"})["advantage/largest"]


def test_a_signal_on_any_rank_is_a_signal_for_all():
    assert run_on_ranks(2, largest_on, [0.0, 1.5]) == [1.5, 1.5]
