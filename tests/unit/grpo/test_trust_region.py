"""The position, velocity and dual KL terms."""

import pytest
import torch

from hyvideo.grpo.trust_region import dual_kl, position_kl, velocity_kl


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


def test_velocity_kl_is_the_mean_fall_of_the_log_prob():
    old, new = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0], requires_grad=True)
    value = velocity_kl(old, new)
    value.backward()
    assert value.item() == -0.25
    assert new.grad.tolist() == [-0.5, -0.5]


def test_velocity_kl_estimates_the_divergence_from_the_rollout_policy():
    rollout, policy = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.4, 1.3)
    torch.manual_seed(0)
    drawn = rollout.sample((200_000,))
    estimate = velocity_kl(rollout.log_prob(drawn), policy.log_prob(drawn))
    assert estimate.item() == pytest.approx(torch.distributions.kl_divergence(rollout, policy).item(), rel=0.03)


def test_dual_kl_weighs_both_terms():
    position, velocity = torch.tensor(3.0), torch.tensor(-2.0)
    assert dual_kl(position, velocity).item() == pytest.approx(2.8)
    assert dual_kl(position, velocity, moving_weight=0.0, step_weight=0.5).item() == -1.0


def test_tensors_of_different_shapes_are_refused_instead_of_broadcast():
    with pytest.raises(ValueError, match=r"mean \(2, 3\) and anchor_mean \(1, 3\)"):
        position_kl(torch.ones(2, 3), torch.ones(1, 3), torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"old_log_probs \(2, 1\) and log_probs \(2,\)"):
        velocity_kl(torch.ones(2, 1), torch.ones(2))
