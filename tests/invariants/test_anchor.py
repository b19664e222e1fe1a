"""The anchor is another set of weights in the policy's place: the same numbers as a second model, and no trace left."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hyvideo.config.schema import KLConfig, ModelConfig
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.training.anchor import Anchor, anchor_kind
from hyvideo.training.trainer import Trainer
from tests.support.training import collect_round, pairs_of

STEPS = range(4)


def trained_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainable_parameters(trainer.state.transformer).items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def move_policy(trainer: Trainer) -> None:
    """Make one update by hand, after which policy and anchor differ."""
    trajectory = collect_round(trainer)
    (pairs,) = pairs_of(trainer, trajectory)
    trainer.update(trajectory, pairs, trainer.update.anchor_means(trajectory, [pairs]), coefficient=0.0)
    trainer.state.anchor.policy_moved()


@pytest.mark.parametrize("offload", [False, True])
def test_the_policy_comes_back_bit_for_bit_even_after_an_error(make_trainer: Callable[..., Trainer], offload: bool):
    trainer = make_trainer(reference_mode_offload=offload)
    start = trained_weights(trainer)
    move_policy(trainer)
    moved = trained_weights(trainer)
    storage = [p.data_ptr() for p in trainer.update.parameters]
    with pytest.raises(KeyboardInterrupt), trainer.state.anchor.in_place_of_policy():
        assert equal(trained_weights(trainer), start)
        raise KeyboardInterrupt
    assert equal(trained_weights(trainer), moved)
    assert [p.data_ptr() for p in trainer.update.parameters] == storage


def test_anchor_means_are_those_of_a_second_model(make_trainer: Callable[..., Trainer]):
    trainer, second = make_trainer(), make_trainer()
    move_policy(trainer)
    trajectory = collect_round(trainer)
    means = trainer.update.anchor_means(trajectory, pairs_of(trainer, trajectory, permute=False))
    for index in STEPS:
        for part in (torch.tensor([0, 1]), torch.tensor([2, 3])):
            latents = trajectory.rollout.latents[part, index]
            conditioning, settings = trajectory.conditioning_of(part), trainer.config.rollout
            with torch.no_grad():
                mean, _ = second.update.pipeline.denoise_step(
                    latents,
                    index,
                    conditioning,
                    second.update.guidance,
                    sde_type=settings.sde_type,
                    eta=settings.eta,
                )
            assert torch.equal(means[part, index], mean)
    assert not torch.allclose(means, trajectory.rollout.means)


def test_the_anchor_is_asked_for_trained_pairs_alone(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer()
    move_policy(trainer)
    trajectory = collect_round(trainer)
    first, second = pairs_of(trainer, trajectory, num_updates=2)
    evaluated = []
    trainer.update.pipeline.transformer.register_forward_hook(
        lambda module, args, kwargs, output: evaluated.append(len(output[0])), with_kwargs=True
    )
    means = trainer.update.anchor_means(trajectory, [first])
    assert sum(evaluated) == len(first.sample_index)
    assert means[first.sample_index, first.step_index].flatten(1).any(1).all()
    assert not means[second.sample_index, second.step_index].any()


def test_an_anchor_that_equals_the_policy_has_the_rollouts_means(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer()
    trajectory = collect_round(trainer)
    assert trainer.update.anchor_means(trajectory, pairs_of(trainer, trajectory)) is trajectory.rollout.means


def test_with_an_adapter_the_anchor_is_the_adapter_alone(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(use_lora=True)
    weights = trainer.state.anchor.state_dict()
    assert weights
    assert all("lora_" in name for name in weights)
    move_policy(trainer)
    trajectory = collect_round(trainer)
    base = make_trainer()
    with torch.no_grad(), trainer.state.anchor.in_place_of_policy():
        arguments = (trajectory.rollout.latents[:, 1], 1, trajectory.conditioning_of(torch.arange(4)))
        anchored = trainer.update.pipeline.velocity(*arguments, trainer.update.guidance)
        assert torch.equal(anchored, base.update.pipeline.velocity(*arguments, base.update.guidance))


def test_the_fixed_anchor_of_a_fresh_adapter_is_the_base_model_and_copies_nothing(make_trainer: Callable[..., Trainer]):
    trainer, copying = (make_trainer(use_lora=True, use_moving_KL=False) for _ in range(2))
    assert trainer.state.anchor.state_dict() == {}
    copying.update.anchor = copying.state.anchor = Anchor(
        trainable_parameters(copying.state.transformer), offload=False
    )
    means = []
    for each in (trainer, copying):
        move_policy(each)
        trajectory = collect_round(each)
        means.append(each.update.anchor_means(trajectory, pairs_of(each, trajectory)))
        frozen = [
            name for name, p in each.state.transformer.named_parameters() if "lora_" in name and not p.requires_grad
        ]
        assert frozen  # the last block's condition stream is still not trained
    assert torch.equal(*means)
    with pytest.raises(ValueError, match="use_moving_KL must be false"):
        trainer.state.anchor.refresh()


def test_the_fixed_anchor_of_an_adapter_trained_before_is_that_adapter():
    fixed = KLConfig(use_moving_KL=False)
    assert anchor_kind(fixed, ModelConfig(use_lora=True)) == "base"
    assert anchor_kind(fixed, ModelConfig(use_lora=True, pretrained_lora_path="trained")) == "copy"


@pytest.mark.parametrize(
    ("moving", "expected"),
    [(True, [False, True, False, True, False]), (False, [False] * 5)],
    ids=["moving, every second update", "fixed"],
)
def test_the_anchor_follows_at_its_interval(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, moving: bool, expected: list[bool]
):
    trainer = make_trainer(max_steps=5, use_moving_KL=moving, update_ref_model_step=2)
    start, followed = trained_weights(trainer), []
    log = trainer.metrics.log

    def spy(step: int, values: dict[str, float]) -> None:
        followed.append(equal(trainer.state.anchor.state_dict(), trained_weights(trainer)))
        assert trainer.state.anchor.equals_policy == followed[-1]
        log(step, values)

    monkeypatch.setattr(trainer.metrics, "log", spy)
    trainer.train()
    assert followed == expected
    assert equal(trainer.state.anchor.state_dict(), start) != moving
