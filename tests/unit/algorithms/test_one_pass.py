"""One-pass GRPO follows the gradient of GRPO, whose update computes the steps of the rollout again."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hyvideo.models.parallelize import trainable_parameters
from hyvideo.training.run import Run
from tests.support.training import GradientRecorder, collect_round

ADAPTER = {"use_lora": True, "rollout_micro_batch_size": 1, "mini_batch_size_per_update": 1, "max_grad_norm": 1e9}
ABSENT = {"ratio/max_deviation", "replay/mean_error", "clip_fraction"}


def move(training: Run, seed: int) -> None:
    """Change the trained weights; the second factor of a new adapter is 0, and so is the first one's gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in trainable_parameters(training.policy.transformer).values():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)


def round_of(training: Run, *, failed: bool = False, at_anchor: bool = False) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of a round whose policy has left its anchor."""
    move(training, 1)
    if training.algorithm.anchor:
        training.algorithm.anchor.refresh()
        if not at_anchor:
            training.algorithm.anchor.policy_moved()
            move(training, 2)
    recorder = GradientRecorder(training)
    trajectory = collect_round(training)
    if failed:
        total = trajectory.scores.total.clone()
        total[1] = torch.nan
        trajectory = replace(trajectory, scores=replace(trajectory.scores, total=total))
    (metrics,) = training.algorithm.updates(trajectory)
    return recorder.gradient, metrics


SETTINGS = [
    {},
    {"kl_weight": 0},
    {"anchor_fraction": 0.25},
    {"anchor_fraction": 0.5, "mini_batch_size_per_update": 3, "use_dual_kl": False},
    {"cfg_scale": 4.0, "ratio_norm": True},
    {"sde_window": "per_group", "sde_window_size": 2},
    {"sde_window": "sliding", "sde_window_size": 3, "timestep_fraction": 0.7, "use_grad_balancing": False},
    {"sde_type": "cps", "timestep_fraction": 0.5, "published": "cps_equalizer"},
    {"sde_type": "flow_grpo", "published": "flow_kl", "anchor_fraction": 0.5},
    {"sde_type": "dance_grpo", "gradient_accumulation_steps": 2, "lora_target_modules": "all-linear"},
    {"activation_checkpointing": "elementwise", "use_same_noise": True},
    {"update_ref_model_step": 0, "use_moving_KL": False},
]


@pytest.mark.parametrize(
    ("settings", "failed"),  # with a score that failed all others are compared too
    [*((settings, True) for settings in SETTINGS), (SETTINGS[0], False), (SETTINGS[2], False)],
    ids=str,
)
def test_its_gradient_and_its_row_are_those_of_two_passes(make_training, settings, failed: bool):
    two, one = (make_training(algorithm=name, **ADAPTER | settings) for name in ("grpo", "grpo_one_pass"))
    (wanted, row), (received, own) = (round_of(training, failed=failed) for training in (two, one))
    assert wanted.norm() > 0
    assert (received - wanted).norm() < 3e-6 * wanted.norm()
    assert set(row) - ABSENT == set(own)
    alike = own.keys() - {"update/evaluations"}
    assert {name: own[name] for name in alike} == pytest.approx({name: row[name] for name in alike}, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_lora": False}, "use_lora true instead of false"),
        ({"updates_per_rollout": 2}, "updates_per_rollout 1 instead of 2"),
        ({"rollout_micro_batch_size": 2}, "rollout_micro_batch_size 1 instead of 2"),
        ({"published": "first_ratio"}, "published without first_ratio"),
        ({"algorithm_options": "name=1"}, "no algorithm_options"),
        ({"enable_fsdp": True, "offload": "weights"}, "offload without weights: the adapter would rest too"),
        ({"enable_fsdp": True, "sde_window": "per_group"}, "another sde_window than per_group, or enable_fsdp false"),
        ({"enable_fsdp": True, "timestep_fraction": 0.5}, "timestep_fraction 1, or enable_timestep_permutation false"),
    ],
)
def test_what_it_cannot_learn_in_one_pass_is_refused(make_training, settings, said: str):
    with pytest.raises(ValueError, match=said):
        make_training(algorithm="grpo_one_pass", **ADAPTER | settings)
