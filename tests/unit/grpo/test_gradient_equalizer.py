"""The temporal gradient equalizer, alone and together with the scheduler's log-probabilities."""

import math

import pytest
import torch

from hyvideo.grpo.clipped_loss import clipped_policy_loss
from hyvideo.grpo.gradient_equalizer import equalizer_scales, velocity_gradients
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler


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
