"""What the transitions must do whatever the code looks like: exact integrals, preserved marginals, true gradients."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyvideo.schedulers.scheduling_flow_match_discrete import SDE_TYPES, FlowMatchDiscreteScheduler

CLAMP = 3e-3


def scheduled(num_steps: int, shift: float = 5.0) -> FlowMatchDiscreteScheduler:
    scheduler = FlowMatchDiscreteScheduler(shift=shift, sage_clamp=CLAMP)
    scheduler.set_timesteps(num_steps)
    return scheduler


def exact_sigmas(num_steps: int, shift: float) -> torch.Tensor:
    line = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return shift * line / (1 + (shift - 1) * line)


def variances(scheduler: FlowMatchDiscreteScheduler, sde_type: str, eta: float) -> torch.Tensor:
    return scheduler.step_weights(sde_type=sde_type, eta=eta).std.square()


@pytest.mark.parametrize(("num_steps", "shift"), [(1, 5.0), (20, 5.0), (50, 9.0), (100, 20.0), (40, 1.0)])
def test_the_sage_variance_is_the_numerical_integral_of_its_diffusion(num_steps, shift):
    eta, points = 0.5, 40_001
    actual = variances(scheduled(num_steps, shift), "sage_grpo", eta)
    sigmas = exact_sigmas(num_steps, shift)
    for index in range(num_steps):
        upper, lower = min(sigmas[index].item(), 1 - CLAMP), sigmas[index + 1].item()
        if lower >= upper:
            assert actual[index] == 0
            continue
        grid = torch.linspace(lower, upper, points, dtype=torch.float64)
        integral = torch.trapezoid(eta**2 * grid / (1 - grid), grid)
        torch.testing.assert_close(actual[index], integral, rtol=1e-5, atol=1e-12)


@given(num_steps=st.integers(1, 200), shift=st.floats(1, 20), eta=st.floats(0.01, 1))
@settings(deadline=None, max_examples=100)
def test_sage_adds_less_noise_than_flow_at_every_unclamped_step(num_steps, shift, eta):
    scheduler = scheduled(num_steps, shift)
    sage, flow = variances(scheduler, "sage_grpo", eta), variances(scheduler, "flow_grpo", eta)
    unclamped = exact_sigmas(num_steps, shift)[:-1] <= 1 - CLAMP
    assert (sage[unclamped] < flow[unclamped]).all()


@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo", "dance_grpo", "cps"])
def test_no_variance_is_negative_for_any_number_of_steps_and_shift(sde_type):
    for num_steps in range(1, 201):
        for shift in (1.0, 2.5, 5.0, 7.0, 9.0, 13.0, 20.0):
            weights = scheduled(num_steps, shift).step_weights(sde_type=sde_type, eta=0.5)
            assert (weights.std >= 0).all()
            assert torch.stack(weights).isfinite().all()


@pytest.mark.parametrize("shift", [0.3, 0.7, 1.1, 5.0, 20.0])
@pytest.mark.parametrize("num_steps", [1, 20])
def test_the_first_flow_step_adds_the_variance_eta_squared_whatever_its_length(num_steps, shift):
    first = variances(scheduled(num_steps, shift), "flow_grpo", 0.5)[0]
    assert first.item() == pytest.approx(0.25, rel=1e-12)


@pytest.mark.parametrize(("num_steps", "shift"), [(68, 5.0), (49, 7.0), (38, 9.0)])
def test_the_first_sage_step_turns_deterministic_where_it_lies_above_the_clamp(num_steps, shift):
    how = {"sde_type": "sage_grpo", "eta": 0.5}
    assert scheduled(num_steps - 1, shift).trained_steps(**how).all()
    assert scheduled(num_steps, shift).trained_steps(**how).tolist() == [False] + [True] * (num_steps - 1)


def gaussian_velocity(x: torch.Tensor, sigma: float, mean: float, std: float) -> torch.Tensor:
    """Return ``E[noise - x0 | x]`` for data ``x0 ~ N(mean, std^2)``."""
    marginal_variance = (1 - sigma) ** 2 * std**2 + sigma**2
    covariance = sigma - (1 - sigma) * std**2
    return -mean + covariance / marginal_variance * (x - (1 - sigma) * mean)


def marginal_errors(sde_type: str, num_steps: int, shift: float) -> dict[str, tuple[float, float]]:
    """Error of the mean, and of the variance ratio, near sigma 0.5 and at the end, under the exact velocity.

    Every step is affine in x, so two rows (the mean and the mean + 1) carry the whole Gaussian without sampling error.
    """
    data_mean, data_std, eta = 1.0, 0.5, 0.5
    scheduler = scheduled(num_steps, shift)
    sigmas = exact_sigmas(num_steps, shift).tolist()
    mean, variance, errors = 0.0, 1.0, {}
    middle = min(range(1, num_steps), key=lambda index: abs(sigmas[index] - 0.5))
    for index in range(num_steps):
        rows = torch.tensor([[mean], [mean + 1]], dtype=torch.float64)
        velocity = gaussian_velocity(rows, sigmas[index], data_mean, data_std)
        means, std = scheduler.transition(velocity, rows, index, sde_type=sde_type, eta=eta)
        slope = (means[1] - means[0]).item()
        mean, variance = means[0].item(), slope**2 * variance + std.item() ** 2
        sigma = sigmas[index + 1]
        true_mean, true_variance = (1 - sigma) * data_mean, (1 - sigma) ** 2 * data_std**2 + sigma**2
        errors[index + 1] = (abs(mean - true_mean), abs(variance / true_variance - 1))
    return {"middle": errors[middle], "end": errors[num_steps]}


@pytest.mark.parametrize("shift", [1.0, 5.0])
@pytest.mark.parametrize(("sde_type", "tolerance"), [("sage_grpo", 2e-3), ("dance_grpo", 2e-3), ("flow_grpo", 6e-3)])
def test_gaussian_marginals_are_preserved_as_steps_grow(sde_type, tolerance, shift):
    coarse, fine = marginal_errors(sde_type, 50, shift), marginal_errors(sde_type, 5000, shift)
    for place in ("middle", "end"):
        mean_error, variance_error = fine[place]
        assert mean_error < 1e-4 and variance_error < tolerance and variance_error < coarse[place][1]


def test_the_published_norms_differ_for_cps_alone_and_spread_its_gradients():
    scheduler = scheduled(16)
    for sde_type in ("sage_grpo", "flow_grpo", "dance_grpo"):
        own, published = (scheduler.gradient_norms(sde_type=sde_type, eta=0.5, published=p) for p in (False, True))
        assert torch.equal(own, published)
    weights = scheduler.step_weights(sde_type="cps", eta=0.5)
    published = scheduler.gradient_norms(sde_type="cps", eta=0.5, published=True)
    expected = (weights.velocity.abs() / weights.std)[:-1].float()
    torch.testing.assert_close(published, torch.cat([expected, torch.zeros(1)]))
    left = scheduler.gradient_norms(sde_type="cps", eta=0.5)[:-1] / published[:-1]
    assert left.max() / left.min() > 10


@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo", "dance_grpo", "cps"])
def test_gradient_norms_are_the_gradients_of_the_log_prob(sde_type):
    scheduler, generator = scheduled(16), torch.Generator().manual_seed(1)
    norms = scheduler.gradient_norms(sde_type=sde_type, eta=0.5)
    assert norms.shape == (16,)
    for index in range(16):
        sample, velocity, noise = (torch.randn(1, 300, generator=generator) for _ in range(3))
        velocity.requires_grad_()
        mean, std = scheduler.transition(velocity, sample, index, sde_type=sde_type, eta=0.5)
        stored = scheduler.sample_next(mean, std, noise)
        log_prob = scheduler.log_prob(stored, mean, std, sde_type=sde_type)
        (gradient,) = torch.autograd.grad(log_prob.sum(), velocity)
        expected = norms[index] * noise.square().mean().sqrt()
        torch.testing.assert_close(gradient.norm() * math.sqrt(300), expected, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
@pytest.mark.parametrize("window", [range(6), range(1, 3)], ids=["all steps", "a window"])
def test_the_noise_left_is_that_of_simulated_rollouts_with_an_exact_velocity(sde_type, window):
    scheduler, clean = scheduled(6, shift=3.0), 2.0
    noisy = torch.tensor([step in window for step in range(6)])
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 400_000, generator=generator, dtype=torch.float64)
    expected = scheduler.noise_left(sde_type=sde_type, eta=0.5, noisy=noisy)
    for index, (sigma, after) in enumerate(itertools.pairwise(scheduler.sigmas)):
        velocity = (sample - clean) / sigma
        noise = torch.randn(sample.shape, generator=generator)
        how = {"sde_type": sde_type, "eta": 0.5, "noisy": noisy[index : index + 1]}
        sample = scheduler.sample_next(*scheduler.transition(velocity, sample, index, **how), noise)
        left = sample - (1 - after) * clean
        assert left.std().item() == pytest.approx(expected[index].item(), rel=0.01, abs=1e-5)


def test_the_noise_left_is_that_of_all_steps_unless_windows_say_otherwise_row_by_row():
    scheduler, how = scheduled(4, shift=3.0), {"sde_type": "sage_grpo", "eta": 0.5}
    every, one = torch.ones(4, dtype=torch.bool), torch.tensor([True, False, False, False])
    rows = torch.stack([every, one])[None]
    both = scheduler.noise_left(**how, noisy=rows)
    assert both.shape == (1, 2, 4) and both.dtype == torch.float64
    assert torch.equal(both[0, 0], scheduler.noise_left(**how)) and both[0, 1, -1] < both[0, 0, -1]
    assert torch.equal(both[0, 1], scheduler.noise_left(**how, noisy=one))
