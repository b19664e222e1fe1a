"""Each transition against its formula by hand in float64, and its log-probability against torch's Normal."""

import math

import pytest
import torch

from hyvideo.schedulers.scheduling_flow_match_discrete import SDE_TYPES, FlowMatchDiscreteScheduler

FLAVOURS = [name for name in SDE_TYPES if name != "ode"]
NUM_STEPS, SHAPE, ETA = 10, (3, 4, 2, 5, 5), 0.6


@pytest.fixture
def scheduler():
    scheduler = FlowMatchDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(NUM_STEPS)
    return scheduler


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    sample, velocity, noise = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    return sample, velocity, noise


def sigma_at(index: int) -> float:
    line = 1 - index / NUM_STEPS
    return 5 * line / (1 + 4 * line)


def variance_by_hand(sde_type: str, index: int) -> float:
    sigma, sigma_next = sigma_at(index), sigma_at(index + 1)
    if sde_type == "dance_grpo":
        return ETA**2 * (sigma - sigma_next)
    if sde_type == "flow_grpo":
        return ETA**2 * (sigma - sigma_next) * sigma / (1 - (sigma_next if index == 0 else sigma))
    clamped = min(sigma, 1 - 3e-3)
    return ETA**2 * (math.log((1 - sigma_next) / (1 - clamped)) - (clamped - sigma_next))


def by_hand(sde_type, index, x, v):
    """Mean and std of the step from `x` with the velocity `v`."""
    sigma, sigma_next = sigma_at(index), sigma_at(index + 1)
    x0_hat, x1_hat = x - sigma * v, x + (1 - sigma) * v
    if sde_type == "cps":
        std = sigma_next * math.sin(ETA * math.pi / 2)
        return (1 - sigma_next) * x0_hat + math.sqrt(sigma_next**2 - std**2) * x1_hat, std
    variance = variance_by_hand(sde_type, index)
    score = -(x - (1 - sigma) * x0_hat) / sigma**2
    return x - (sigma - sigma_next) * v + 0.5 * variance * score, math.sqrt(variance)


@pytest.mark.parametrize("index", range(NUM_STEPS))
@pytest.mark.parametrize("sde_type", FLAVOURS)
def test_mean_and_std_follow_the_written_formula(scheduler, tensors, sde_type, index):
    sample, velocity, _ = tensors
    expected_mean, expected_std = by_hand(sde_type, index, sample.double(), velocity.double())

    mean, std = scheduler.transition(velocity, sample, index, sde_type=sde_type, eta=ETA)

    assert mean.dtype == std.dtype == torch.float32
    torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-5, atol=1e-5)
    assert std.shape == (1, 1, 1, 1, 1)
    assert std.item() == pytest.approx(expected_std, rel=1e-5, abs=1e-9)
    sensitivity = scheduler.step_weights(sde_type=sde_type, eta=ETA).velocity[index]
    assert sensitivity.item() == pytest.approx(by_hand(sde_type, index, 0.0, 1.0)[0])  # the mean is linear in v


@pytest.mark.parametrize("sde_type", FLAVOURS)
def test_a_log_prob_is_the_mean_of_the_elements_log_densities_and_so_is_its_gradient(scheduler, tensors, sde_type):
    sample, velocity, noise = tensors
    mean, std = scheduler.transition(velocity, sample, 3, sde_type=sde_type, eta=ETA)
    stored, mean = scheduler.sample_next(mean, std, noise), (mean + 0.1 * sample).requires_grad_()
    log_prob = scheduler.log_prob(stored, mean, std, sde_type=sde_type)
    (gradient,) = torch.autograd.grad(log_prob.sum(), mean)
    error, count = (stored - mean).detach().double(), math.prod(SHAPE[1:])
    if sde_type == "cps":
        terms, slopes = -error.square(), 2 * error
    else:
        terms = torch.distributions.Normal(mean.detach().double(), std.double()).log_prob(stored.double())
        slopes = error / std.double().square()
    torch.testing.assert_close(log_prob.double(), terms.sum((1, 2, 3, 4)) / count, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), slopes / count, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("sde_type", FLAVOURS)
def test_mixed_steps_in_one_batch_equal_each_row_alone_bit_for_bit(scheduler, tensors, sde_type):
    sample, velocity, noise = tensors
    for steps in torch.arange(12).remainder(NUM_STEPS).split(SHAPE[0]):
        mean, std = scheduler.transition(velocity, sample, steps, sde_type=sde_type, eta=ETA)
        stored = scheduler.sample_next(mean, std, noise)
        log_prob = scheduler.log_prob(stored, mean, std, sde_type=sde_type)
        for row, step in enumerate(steps.tolist()):
            alone = scheduler.transition(velocity[row, None], sample[row, None], step, sde_type=sde_type, eta=ETA)
            assert torch.equal(mean[row, None], alone[0]) and torch.equal(std[row, None], alone[1])
            assert torch.equal(log_prob[row, None], scheduler.log_prob(stored[row, None], *alone, sde_type=sde_type))


@pytest.mark.parametrize("sde_type", FLAVOURS)
def test_without_noise_every_flavour_is_the_euler_step(scheduler, tensors, sde_type):
    sample, velocity, _ = tensors
    for index in range(NUM_STEPS):
        mean, std = scheduler.transition(velocity, sample, index, sde_type=sde_type, eta=0.0)
        assert std.count_nonzero() == 0
        euler, none = scheduler.transition(velocity, sample, index, sde_type="ode", eta=0.0)
        torch.testing.assert_close(mean, euler, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(euler, sample - (sigma_at(index) - sigma_at(index + 1)) * velocity)
        assert none.count_nonzero() == 0


@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo", "dance_grpo"])
def test_log_prob_is_the_mean_log_density_of_a_normal(scheduler, tensors, sde_type):
    sample, velocity, noise = tensors
    index = torch.tensor([0, 4, 9])
    mean, std = scheduler.transition(velocity, sample, index, sde_type=sde_type, eta=ETA)
    stored = scheduler.sample_next(mean, std, noise)
    assert torch.equal(stored, mean + std * noise)
    density = torch.distributions.Normal(mean.double(), std.double().expand_as(mean)).log_prob(stored.double())
    log_prob = scheduler.log_prob(stored, mean, std, sde_type=sde_type)
    assert log_prob.shape == (SHAPE[0],)
    torch.testing.assert_close(log_prob.double(), density.mean(dim=(1, 2, 3, 4)), rtol=1e-5, atol=1e-5)


def test_cps_log_prob_is_the_squared_error_alone(scheduler, tensors):
    sample, velocity, noise = tensors
    mean, std = scheduler.transition(velocity, sample, 3, sde_type="cps", eta=ETA)
    log_prob = scheduler.log_prob(scheduler.sample_next(mean, std, noise), mean, std, sde_type="cps")
    expected = -(std.double().item() ** 2) * noise.double().square().mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(log_prob.double(), expected, rtol=1e-5, atol=1e-7)


def test_the_last_cps_step_is_deterministic_and_not_trained(scheduler, tensors):
    sample, velocity, noise = tensors
    mean, std = scheduler.transition(velocity, sample, NUM_STEPS - 1, sde_type="cps", eta=ETA)
    stored = scheduler.sample_next(mean, std, noise)
    assert torch.equal(stored, mean)
    assert scheduler.log_prob(stored, mean, std, sde_type="cps").count_nonzero() == 0
    assert scheduler.trained_steps(sde_type="cps", eta=ETA).tolist() == [True] * (NUM_STEPS - 1) + [False]


def test_a_deterministic_sage_step_has_log_prob_zero_and_zero_gradient():
    scheduler = FlowMatchDiscreteScheduler(shift=9.0)
    scheduler.set_timesteps(50)
    assert scheduler.trained_steps(sde_type="sage_grpo", eta=0.5).tolist() == [False] + [True] * 49
    assert scheduler.gradient_norms(sde_type="sage_grpo", eta=0.5)[0] == 0
    sample, velocity = torch.randn(2, 6), torch.randn(2, 6, requires_grad=True)
    mean, std = scheduler.transition(velocity, sample, torch.tensor([0, 1]), sde_type="sage_grpo", eta=0.5)
    log_prob = scheduler.log_prob(mean + 0.1, mean, std, sde_type="sage_grpo")
    assert log_prob[0] == 0
    assert log_prob[1].isfinite()
    log_prob.sum().backward()
    assert velocity.grad[0].count_nonzero() == 0
    assert velocity.grad[1].count_nonzero() == 6


@pytest.mark.parametrize("sde_type", FLAVOURS)
def test_half_precision_velocities_are_computed_on_in_float32(scheduler, tensors, sde_type):
    sample, velocity, _ = tensors
    rounded = velocity.bfloat16()
    mean, _ = scheduler.transition(rounded, sample, 3, sde_type=sde_type, eta=ETA)
    assert mean.dtype == torch.float32
    assert torch.equal(mean, scheduler.transition(rounded.float(), sample, 3, sde_type=sde_type, eta=ETA)[0])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (10, r"index must lie in 0\.\.9 for 10 steps, got 10"),
        (-1, r"index must lie in 0\.\.9"),
        (torch.tensor([0, 1]), r"LongTensor of shape \(3,\).*got torch.int64 of shape \(2,\)"),
        (torch.tensor([0.0, 1.0, 2.0]), "got torch.float32"),
    ],
)
def test_an_index_that_names_no_step_is_refused(scheduler, tensors, index, message):
    sample, velocity, _ = tensors
    with pytest.raises(ValueError, match=message):
        scheduler.transition(velocity, sample, index, sde_type="sage_grpo", eta=ETA)


def test_a_velocity_of_another_shape_and_an_unknown_flavour_are_refused(scheduler, tensors):
    sample, velocity, _ = tensors
    with pytest.raises(ValueError, match=r"velocity \(1, 4, 2, 5, 5\) and sample \(3, 4, 2, 5, 5\)"):
        scheduler.transition(velocity[:1], sample, 0, sde_type="sage_grpo", eta=ETA)
    with pytest.raises(ValueError, match="'sage_gpro'.*sage_grpo, flow_grpo, dance_grpo, cps.*mean 'sage_grpo'"):
        scheduler.transition(velocity, sample, 0, sde_type="sage_gpro", eta=ETA)
    with pytest.raises(ValueError, match="unknown sde_type"):
        scheduler.log_prob(sample, sample, torch.ones(1), sde_type="ddpm")


@pytest.mark.parametrize(("sde_type", "eta"), [("sage_grpo", -0.1), ("cps", 1.5), ("flow_grpo", math.inf)])
def test_a_noise_strength_out_of_range_is_refused(scheduler, sde_type, eta):
    with pytest.raises(ValueError, match=f"eta must be .*{sde_type}.*got {eta}"):
        scheduler.trained_steps(sde_type=sde_type, eta=eta)
    scheduler.trained_steps(sde_type="cps", eta=1.0)


@pytest.mark.parametrize("sde_type", ["sage_grpo", "cps"])
def test_rows_without_noise_take_the_odes_step(sde_type):
    scheduler = FlowMatchDiscreteScheduler()
    scheduler.set_timesteps(6)
    sample, velocity = torch.randn(2, 3, 2, 4, 4), torch.randn(2, 3, 2, 4, 4)
    noisy = torch.tensor([True, False])
    mean, std = scheduler.transition(velocity, sample, 2, sde_type=sde_type, eta=0.5, noisy=noisy)
    with_noise, sde_std = scheduler.transition(velocity, sample, 2, sde_type=sde_type, eta=0.5)
    without, _ = scheduler.transition(velocity, sample, 2, sde_type="ode", eta=0.0)
    assert torch.equal(mean[0], with_noise[0])
    assert torch.equal(mean[1], without[1])
    assert std.flatten().tolist() == [sde_std.item(), 0.0]
