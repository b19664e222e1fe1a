"""Settings that say how to compute, not what, leave the numbers of a run as they are."""

import pytest
from torch import Tensor

from tests.support.equal_runs import rows_of
from tests.support.training import ALGORITHMS, GradientRecorder, collect_round, pairs_of, update


@pytest.fixture
def train(trained):
    """Train for three updates and return what was logged, without the times."""
    return lambda **settings: rows_of(trained(**settings).folder.path)


def test_equal_runs_are_equal_bit_for_bit(train):
    assert train() == train()


OTHERWISE = {
    **{"activation_checkpointing": "full", "offload": ["anchor", "encoders"]},
    **{"save_interval": 2, "validation_interval": 2, "validate_at_step0": True},
    **{"batch_size": 2, "gradient_accumulation_steps": 2, "log_interval": 5},
}
"""A run that saves memory, is watched, and accumulates its round."""


@pytest.mark.parametrize(("algorithm", "use_lora"), [("grpo", False), ("nft", True)])
def test_how_a_run_is_computed_and_watched_changes_no_bit(train, algorithm, use_lora):
    method = {**ALGORITHMS[algorithm], "use_lora": use_lora}
    expected = train(**method)
    assert len(expected) == 3
    assert expected[1].get("kl/position") or expected[1]["nft/old_distance"]
    rows = train(**OTHERWISE, **method)
    watched = ("valid/", "rollout/ode_gap")  # what only a run with validations logs
    assert [{name: row[name] for name in row if not name.startswith(watched)} for row in rows] == expected


def test_gradients_do_not_depend_on_the_micro_batch(make_training):
    training = make_training(max_grad_norm=1e9, kl_weight=1.0, update_ref_model_step=99)
    first = collect_round(training)
    update(training, first, pairs_of(training, first)[0])  # so that every term of the loss has a gradient
    trajectory = collect_round(training)
    (pairs,) = pairs_of(training, trajectory)
    recorder = GradientRecorder(training)

    def gradient(micro_batch: int) -> Tensor:
        training.config.grpo.mini_batch_size_per_update = micro_batch
        means = training.algorithm._anchor_means(trajectory, [pairs])
        training.algorithm.anchor.equals_policy = False
        update(training, trajectory, pairs, means, coefficient=1.0)
        return recorder.gradient

    whole = gradient(16)
    scale = whole.abs().max()
    assert scale > 0
    for micro_batch in (1, 5, 8):  # 5 leaves a smaller last one
        assert (gradient(micro_batch) - whole).abs().max() <= 1e-5 * scale, micro_batch


def test_gradients_of_nft_do_not_depend_on_the_micro_batch(make_training):
    training = make_training(max_grad_norm=1e9, **ALGORITHMS["nft"])
    list(training.algorithm.updates(collect_round(training)))  # so that every term of the loss has a gradient
    trajectory, recorded = collect_round(training), []
    recorder = GradientRecorder(training)
    old_policy = {name: weight.clone() for name, weight in training.algorithm.anchor.state_dict().items()}
    for training.config.grpo.mini_batch_size_per_update in (12, 5, 1):
        training.algorithm.anchor.load_state_dict(old_policy, equals_policy=False)  # every round moves it
        next(training.algorithm.updates(trajectory))
        recorded.append(recorder.gradient)
    for gradient in recorded[1:]:
        assert (gradient - recorded[0]).abs().max() <= 1e-5 * recorded[0].abs().max()
