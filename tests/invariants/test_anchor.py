"""The anchor is another set of weights in the policy's place: the same numbers as a second model, and no trace left."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hyvideo.algorithms.grpo import anchor_kind
from hyvideo.algorithms.weights_copy import WeightsCopy
from hyvideo.config.schema import Config, KLConfig, ModelConfig
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.training.run import Run
from tests.support.training import GradientRecorder, collect_round, pairs_of, update, weights_of

STEPS = range(4)


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def move_policy(training: Run) -> None:
    """Make one update by hand, after which policy and anchor differ."""
    trajectory = collect_round(training)
    (pairs,) = pairs_of(training, trajectory)
    update(training, trajectory, pairs)


@pytest.mark.parametrize("offload", [False, True])
def test_the_policy_comes_back_bit_for_bit_even_after_an_error(make_training, offload: bool):
    training = make_training(reference_mode_offload=offload)
    start = weights_of(training)
    move_policy(training)
    moved = weights_of(training)
    storage = [p.data_ptr() for p in training.algorithm.optimization.parameters.values()]
    with pytest.raises(KeyboardInterrupt), training.algorithm.anchor.in_place_of_policy():
        assert equal(weights_of(training), start)
        raise KeyboardInterrupt
    assert equal(weights_of(training), moved)
    assert [p.data_ptr() for p in training.algorithm.optimization.parameters.values()] == storage


def test_anchor_means_are_those_of_a_second_model_and_asked_for_trained_pairs_alone(make_training):
    training, second = make_training(), make_training()
    trajectory = collect_round(training)
    same = training.algorithm._anchor_means(trajectory, pairs_of(training, trajectory))
    assert same is trajectory.rollout.means  # the anchor still equals the policy
    update(training, trajectory, pairs_of(training, trajectory)[0])
    trajectory = collect_round(training)
    means = training.algorithm._anchor_means(trajectory, pairs_of(training, trajectory, permute=False))
    for index in STEPS:
        for part in (torch.tensor([0, 1]), torch.tensor([2, 3])):
            latents = trajectory.rollout.latents[part, index]
            with torch.no_grad():
                mean, _ = second.policy.step(latents, index, trajectory.conditioning_of(part))
            assert torch.equal(means[part, index], mean)
    assert not torch.allclose(means, trajectory.rollout.means)

    asked, other = pairs_of(training, trajectory, num_updates=2)
    evaluated = []
    training.policy.transformer.register_forward_hook(lambda *call: evaluated.append(len(call[2][0])))
    means = training.algorithm._anchor_means(trajectory, [asked])
    assert sum(evaluated) == len(asked.sample_index)
    assert means[asked.sample_index, asked.step_index].flatten(1).any(1).all()
    assert not means[other.sample_index, other.step_index].any()


def test_a_share_of_the_anchors_passes_has_the_mean_of_all(make_training):
    """Over the choices of one step in four, loss and gradient average to those of all four."""
    training = make_training(anchor_fraction=0.25, max_grad_norm=1e9, update_ref_model_step=99)
    algorithm, evaluated = training.algorithm, []
    move_policy(training)
    trajectory = collect_round(training)
    steps = algorithm.choose_steps(trajectory, training.policy.stochastic_steps())
    recorder = GradientRecorder(training)
    counter = training.policy.transformer.register_forward_hook(lambda *call: evaluated.append(len(call[2][0])))
    algorithm.anchor.policy_moved()
    compared = algorithm.compare(trajectory)
    assert sum(evaluated) == steps.numel() // 4

    def measured(weights: Tensor | None) -> tuple[Tensor, Tensor, int]:
        """Position term, gradient and rows of the passes without gradient."""
        evaluated.clear()
        chosen = compared.updates if weights is None else [pairs.where(weights > 0) for pairs in compared.updates]
        means = algorithm._anchor_means(trajectory, chosen)
        asked = replace(compared, anchor_weights=weights, anchor_means=means)
        metrics = algorithm.update(asked, compared.updates[0], coefficient=1.0)
        return torch.tensor(metrics["kl/position"]), recorder.gradient, sum(evaluated) - steps.numel()

    drawn = [algorithm._anchor_weights(replace(trajectory, round=round), steps) for round in range(30)]
    parts = [measured(weights) for weights in {str(weights): weights for weights in drawn}.values()]
    of_all = measured(None)
    counter.remove()
    assert len(parts) == 4 and all(rows == steps.numel() // 4 for _, _, rows in parts)
    assert of_all[2] == steps.numel()
    for which in (0, 1):
        mean = torch.stack([part[which] for part in parts]).mean(0)
        torch.testing.assert_close(mean, of_all[which], rtol=1e-4, atol=1e-5 * float(mean.abs().max()))
    assert len({float(part[0]) for part in parts}) == 4  # a choice alone has another value


def test_an_update_without_a_compared_step_has_no_position_term(make_training):
    """One of four steps is compared with the anchor, so that one of two updates has none."""
    training = make_training(anchor_fraction=0.25, updates_per_rollout=2, update_ref_model_step=99)
    first, second = (list(training.algorithm.updates(collect_round(training))) for _ in range(2))
    assert [row["kl/position"] for row in first] == [0.0, 0.0]
    assert sorted(row["kl/position"] > 0 for row in second) == [False, True]


def test_with_an_adapter_the_anchor_is_the_adapter_alone(make_training):
    training = make_training(use_lora=True)
    weights = training.algorithm.anchor.state_dict()
    assert weights and all("lora_" in name for name in weights)
    move_policy(training)
    trajectory = collect_round(training)
    base = make_training()
    with torch.no_grad(), training.algorithm.anchor.in_place_of_policy():
        arguments = (trajectory.rollout.latents[:, 1], 1, trajectory.conditioning_of(torch.arange(4)))
        anchored = training.policy.velocity(*arguments)
        assert torch.equal(anchored, base.policy.velocity(*arguments))


def test_the_fixed_anchor_of_a_fresh_adapter_is_the_base_model_and_copies_nothing(make_training):
    training, copying = (make_training(use_lora=True, use_moving_KL=False) for _ in range(2))
    assert training.algorithm.anchor.state_dict() == {}
    copying.algorithm.anchor = WeightsCopy(trainable_parameters(copying.policy.transformer), offload=False)
    means = []
    for each in (training, copying):
        move_policy(each)
        trajectory = collect_round(each)
        means.append(each.algorithm._anchor_means(trajectory, pairs_of(each, trajectory)))
        names = each.policy.transformer.named_parameters()  # the last block's condition stream is still not trained
        assert any("lora_" in name and not parameter.requires_grad for name, parameter in names)
    assert torch.equal(*means)


def test_the_fixed_anchor_of_an_adapter_trained_before_is_that_adapter():
    for kl in (KLConfig(use_moving_KL=False), KLConfig(update_ref_model_step=0)):
        assert anchor_kind(Config(ModelConfig(use_lora=True), kl=kl)) == "base"
        assert anchor_kind(Config(ModelConfig(use_lora=True, pretrained_lora_path="trained"), kl=kl)) == "copy"


@pytest.mark.parametrize(("interval", "expected"), [(2, [False, True, False, True, False]), (0, [False] * 5)], ids=str)
def test_the_anchor_follows_at_its_interval(make_training, monkeypatch, interval, expected):
    training = make_training(max_steps=5, update_ref_model_step=interval)
    start, followed = weights_of(training), []
    log = training.journal.metrics.log

    def spy(step: int, values: dict[str, float]) -> None:
        followed.append(equal(training.algorithm.anchor.state_dict(), weights_of(training)))
        assert training.algorithm.anchor.equals_policy == followed[-1]
        log(step, values)

    monkeypatch.setattr(training.journal.metrics, "log", spy)
    training.train()
    assert followed == expected and equal(training.algorithm.anchor.state_dict(), start) == (interval == 0)
