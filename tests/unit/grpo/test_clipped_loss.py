"""The terms of the loss against plain loops and torch's Normal: clipped policy loss, equalizer and trust region."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hyvideo.grpo.clipped_loss import clipped_policy_loss, normalized_log_ratio
from hyvideo.grpo.gradient_equalizer import equalizer_scales, velocity_gradients
from hyvideo.grpo.trust_region import dual_kl, position_kl, velocity_kl
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

CLIP = 1e-2
NO_RANGE = ({"clip_range": 0.0}, {"clip_range": 0.0, "clip_range_high": 0.1}, {"clip_range_high": 0.0})
numbers = st.floats(-3, 3).map(lambda value: round(value, 6))


ROWS = st.tuples(numbers, st.floats(-0.05, 0.05), st.one_of(numbers, st.just(0.0)), st.floats(0.1, 10))


@given(st.lists(ROWS, min_size=1, max_size=12), st.sampled_from([None, CLIP / 4, CLIP * 3]))
@example([(0.0, math.log(r), a, 2.0) for a in (1.0, -1.0, 0.0) for r in (0.9, 0.995, 1.0, 1.005, 1.1)], None)
@settings(deadline=None)
def test_loss_and_gradient_are_those_computed_sample_by_sample(rows, high):
    old, change, advantages, scales = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    new = (old + change).requires_grad_()
    loss, diagnostics = clipped_policy_loss(new, old, advantages, CLIP, scales, clip_range_high=high)
    loss.backward()
    losses, gradients, deviations, clipped = [], [], [], 0
    for step, advantage, scale in zip((new - old).tolist(), advantages.tolist(), scales.tolist(), strict=True):
        ratio = math.exp(step)
        losses.append(scale * max(-advantage * ratio, -advantage * min(max(ratio, 1 - CLIP), 1 + (high or CLIP))))
        beyond = (advantage > 0 and ratio > 1 + (high or CLIP)) or (advantage < 0 and ratio < 1 - CLIP)
        gradients.append(0.0 if beyond else -advantage * ratio * scale / len(rows))
        deviations.append(abs(ratio - 1))
        clipped += beyond
    assert loss.item() == pytest.approx(sum(losses) / len(rows), rel=1e-9, abs=1e-9)
    assert new.grad.tolist() == pytest.approx(gradients, rel=1e-9, abs=1e-12)
    assert diagnostics.clip_fraction.item() == pytest.approx(clipped / len(rows))
    assert diagnostics.ratio_max_deviation.item() == pytest.approx(max(deviations), abs=1e-12)


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


def test_before_the_first_update_the_loss_is_the_policy_gradient_and_nothing_is_clipped():
    log_probs = torch.tensor([-1.3, -0.7, -2.0], requires_grad=True)
    advantages, scale = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.0, 0.5, 4.0], dtype=torch.float64)
    loss, diagnostics = clipped_policy_loss(log_probs, log_probs.detach().clone(), advantages, 1e-4, scale)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(log_probs.grad, -advantages * scale.float() / 3)
    assert diagnostics.ratio_max_deviation == diagnostics.clip_fraction == 0
    assert not any(value.requires_grad for value in vars(diagnostics).values())


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
