"""The terms of the loss against plain loops and torch's Normal: clipped policy loss, equalizer and trust region."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyvideo.grpo.clipped_loss import clipped_policy_loss, normalized_log_ratio
from hyvideo.grpo.gradient_equalizer import equalizer_scales, velocity_gradients
from hyvideo.grpo.trust_region import dual_kl, position_kl, velocity_kl
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

CLIP = 1e-2
NO_RANGE = ({"clip_range": 0.0}, {"clip_range": 0.0, "clip_range_high": 0.1}, {"clip_range_high": 0.0})
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
        (1, 1.1, False),
        (-1, 0.9, False),
        (1, 0.9, True),
        (-1, 1.1, True),
        (1, 1, True),
        (-1, 1.005, True),
        (0, 1.1, False),
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
    assert diagnostics.ratio_max_deviation == diagnostics.clip_fraction == 0
    assert not any(value.requires_grad for value in vars(diagnostics).values())
    double = torch.ones_like(log_probs, dtype=torch.float64)
    assert clipped_policy_loss(log_probs, log_probs.detach(), torch.ones(3), CLIP, double)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *((wrong, "clip_range must be positive .* got 0.0") for wrong in NO_RANGE),
        ({"old_log_probs": torch.zeros(4, 1)}, r"old_log_probs must have the shape .*\(4,\), got \(4, 1\)"),
        ({"advantages": torch.zeros(4, 1)}, r"advantages of shape \(4, 1\) does not broadcast"),
        ({"scale": torch.ones(3)}, r"scale of shape \(3,\) does not broadcast"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_instead_of_broadcast(changed, message):
    arguments = dict.fromkeys(("log_probs", "old_log_probs", "advantages"), torch.zeros(4))
    with pytest.raises(ValueError, match=message):
        clipped_policy_loss(**(arguments | {"clip_range": CLIP, "scale": torch.ones(4)} | changed))
    with pytest.raises(ValueError, match=r"mean \(2, 3\) and anchor_mean \(1, 3\)"):
        position_kl(torch.ones(2, 3), torch.ones(1, 3), torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"old_log_probs \(2, 1\) and log_probs \(2,\)"):
        velocity_kl(torch.ones(2, 1), torch.ones(2))


@pytest.mark.parametrize(
    ("norms", "scales"),
    [
        ([0.5, 4.0, 2.0], [4.0, 0.5, 1.0]),
        ([8.0, 1.0, 2.0, 4.0], [0.25, 2.0, 1.0, 0.5]),  # the median of an even count is the lower middle
        ([math.inf, 0.0, 1.0, math.nan, 2.0, 4.0], [1.0, 1.0, 2.0, 1.0, 1.0, 0.5]),  # steps without a usable norm
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
        ([1e-8], [0.5]),  # a norm as small as the epsilon
    ],
)
def test_scales_bring_every_usable_norm_to_the_median(norms, scales):
    torch.testing.assert_close(equalizer_scales(torch.tensor(norms)), torch.tensor(scales))
    with pytest.raises(ValueError, match=r"norms must be \[K\].*\(2, 3\)"):
        equalizer_scales(torch.ones(2, 3))


def test_velocity_gradients_are_those_of_each_pair_alone_and_leave_the_graph_whole():
    scheduler, generator = FlowMatchDiscreteScheduler(shift=5.0), torch.Generator().manual_seed(0)
    scheduler.set_timesteps(4)
    weights = scheduler.step_weights(sde_type="sage_grpo", eta=0.5)
    norms = scheduler.gradient_norms(sde_type="sage_grpo", eta=0.5)
    sample, velocity, noise = (torch.randn(3, 2, 50, generator=generator) for _ in range(3))
    index, advantages, scales = torch.tensor([0, 1, 3]), torch.tensor([0.5, -2.0, 0.0]), torch.tensor([1.0, 0.3, 7.0])
    velocity.requires_grad_()
    mean, std = scheduler.transition(velocity, sample, index, sde_type="sage_grpo", eta=0.5)
    log_probs = scheduler.log_prob(scheduler.sample_next(mean, std, noise), mean, std, sde_type="sage_grpo")
    loss, _ = clipped_policy_loss(log_probs, log_probs.detach(), advantages, 1e-4, scales)
    found = velocity_gradients(loss, mean, weights.velocity.abs()[index])
    rms = noise.square().mean(dim=(1, 2)).sqrt()
    torch.testing.assert_close(found, scales * advantages.abs() * norms[index] * rms, rtol=1e-4, atol=1e-6)
    loss.backward()
    per_pair = velocity.grad.flatten(1).norm(dim=1) * 3 * 100**0.5
    torch.testing.assert_close(found, per_pair, rtol=1e-4, atol=1e-6)


def test_position_kl_is_the_mean_divergence_of_two_normals_of_one_std():
    generator = torch.Generator().manual_seed(0)
    mean, anchor = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    std = torch.tensor([0.5, 2.0], dtype=torch.float64).reshape(2, 1, 1)
    policies = [torch.distributions.Normal(mu, std.expand_as(mu)) for mu in (mean, anchor)]
    expected = torch.distributions.kl_divergence(*policies).mean()
    torch.testing.assert_close(position_kl(mean, anchor, std), expected, rtol=1e-4, atol=0)


def test_position_kl_pulls_towards_the_anchor_is_zero_there_and_finite_for_a_deterministic_step():
    mean = torch.tensor([[1.0, -2.0]], requires_grad=True)
    position_kl(mean, torch.zeros(1, 2), torch.ones(1, 1)).backward()
    torch.testing.assert_close(mean.grad, torch.tensor([[0.5, -1.0]]), rtol=1e-5, atol=0)
    mean = torch.ones(2, 3)
    assert position_kl(mean, mean.clone(), torch.zeros(1, 1)) == 0
    assert position_kl(mean, mean + 1e-3, torch.zeros(1, 1)).item() == pytest.approx(0.5, rel=1e-3)


def test_velocity_kl_is_the_mean_fall_of_the_log_prob_and_dual_kl_weighs_both_terms():
    old, new = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0], requires_grad=True)
    value = velocity_kl(old, new)
    value.backward()
    assert value.item() == -0.25 and new.grad.tolist() == [-0.5, -0.5]
    position, velocity = torch.tensor(3.0), torch.tensor(-2.0)
    assert dual_kl(position, velocity).item() == pytest.approx(2.8)
    assert dual_kl(position, velocity, moving_weight=0.0, step_weight=0.5).item() == -1.0
