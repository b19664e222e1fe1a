"""The clipped policy loss against a plain loop over samples."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyvideo.grpo.clipped_loss import clipped_policy_loss, normalized_log_ratio

CLIP = 1e-2
numbers = st.floats(-3, 3).map(lambda value: round(value, 6))


def loop_loss(log_probs, old_log_probs, advantages, scales, high=CLIP):
    total = 0.0
    for new, old, advantage, scale in zip(log_probs, old_log_probs, advantages, scales, strict=True):
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - CLIP), 1 + high)
        total += scale * max(-advantage * ratio, -advantage * clipped)
    return total / len(log_probs)


@given(st.lists(st.tuples(numbers, st.floats(-0.05, 0.05), numbers, st.floats(0.1, 10)), min_size=1, max_size=12))
@settings(deadline=None)
def test_the_loss_is_the_one_computed_sample_by_sample(rows):
    old, change, advantages, scales = (list(column) for column in zip(*rows, strict=True))
    new = [value + step for value, step in zip(old, change, strict=True)]
    tensors = [torch.tensor(column, dtype=torch.float64) for column in (new, old, advantages)]
    loss, diagnostics = clipped_policy_loss(*tensors, CLIP, torch.tensor(scales, dtype=torch.float64))
    assert loss.item() == pytest.approx(loop_loss(new, old, advantages, scales), rel=1e-9, abs=1e-9)
    ratios = [math.exp(a - b) for a, b in zip(new, old, strict=True)]
    beyond = [
        (advantage > 0 and ratio > 1 + CLIP) or (advantage < 0 and ratio < 1 - CLIP)
        for ratio, advantage in zip(ratios, advantages, strict=True)
    ]
    assert diagnostics.clip_fraction.item() == pytest.approx(sum(beyond) / len(rows))
    assert diagnostics.ratio_max_deviation.item() == pytest.approx(max(abs(ratio - 1) for ratio in ratios), abs=1e-12)


@pytest.mark.parametrize("high", [CLIP / 4, CLIP * 3])
def test_the_bound_above_may_be_another_one(high):
    change, advantages = [-0.05, -0.005, 0.001, 0.008, 0.02, 0.05], [-1.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    new, old = torch.tensor(change, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    loss, _ = clipped_policy_loss(new, old, torch.tensor(advantages), CLIP, 1.0, clip_range_high=high)
    assert loss.item() == pytest.approx(loop_loss(change, [0.0] * 6, advantages, [1.0] * 6, high), rel=1e-9)


def test_the_normalized_log_ratio_is_the_gaussians_without_its_negative_part_times_the_std():
    drawn = torch.Generator().manual_seed(0)
    mean, old, noise = (torch.randn(5, 3, 4, generator=drawn, dtype=torch.float64) for _ in range(3))
    std = torch.tensor([0.02, 0.1, 0.5, 1.0, 3.0], dtype=torch.float64).view(-1, 1, 1)
    reached = old + std * noise
    laws = [torch.distributions.Normal(mu, std) for mu in (mean, old)]
    log_ratio, distance = laws[0].log_prob(reached) - laws[1].log_prob(reached), (mean - old).square() / (2 * std**2)
    expected = ((log_ratio + distance) * std).mean((1, 2))
    torch.testing.assert_close(normalized_log_ratio(mean, old, reached, std), expected)
    torch.testing.assert_close(expected, ((mean - old) * noise).mean((1, 2)))


@pytest.mark.parametrize(
    ("advantage", "ratio", "learns"),
    [
        (1.0, 1.1, False),
        (-1.0, 0.9, False),
        (1.0, 0.9, True),
        (-1.0, 1.1, True),
        (1.0, 1.0, True),
        (-1.0, 1.005, True),
        (0.0, 1.1, False),
    ],
)
def test_the_gradient_is_zero_once_the_ratio_has_moved_past_the_clip_as_asked(advantage, ratio, learns):
    log_prob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    loss, _ = clipped_policy_loss(log_prob, old, advantages, CLIP, 2.0)
    loss.backward()
    expected = -advantage * ratio * 2.0 if learns else 0.0
    assert log_prob.grad.item() == pytest.approx(expected)


def test_before_the_first_update_the_loss_is_the_policy_gradient_and_nothing_is_clipped():
    log_probs = torch.tensor([-1.3, -0.7, -2.0], requires_grad=True)
    advantages, scale = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.0, 0.5, 4.0])
    loss, diagnostics = clipped_policy_loss(log_probs, log_probs.detach().clone(), advantages, 1e-4, scale)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -advantages * scale / 3)
    assert diagnostics.ratio_max_deviation == 0
    assert diagnostics.clip_fraction == 0
    assert not any(value.requires_grad for value in vars(diagnostics).values())
    double = torch.ones_like(log_probs, dtype=torch.float64)
    assert clipped_policy_loss(log_probs, log_probs.detach(), torch.ones(3), CLIP, double)[0].dtype == torch.float32


@pytest.mark.parametrize(
    "changed",
    [
        {"old_log_probs": torch.zeros(4, 1)},
        {"advantages": torch.zeros(4, 1)},
        {"scale": torch.ones(3)},
    ],
)
def test_inputs_that_do_not_fit_are_refused_instead_of_broadcast(changed):
    arguments = dict.fromkeys(("log_probs", "old_log_probs", "advantages"), torch.zeros(4))
    with pytest.raises((ValueError, RuntimeError), match="do not fit|must match"):
        clipped_policy_loss(**(arguments | {"clip_range": CLIP, "scale": torch.ones(4)} | changed))
