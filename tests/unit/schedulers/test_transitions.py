"""The schedule and each transition: formulas by hand, preserved marginals, true gradients."""

import itertools
import math

import pytest
import torch

from hyvideo.schedulers.scheduling_flow_match_discrete import SDE_TYPES, FlowMatchDiscreteScheduler


def scheduled(num_steps: int, shift: float = 5.0, **settings: float) -> FlowMatchDiscreteScheduler:
    scheduler = FlowMatchDiscreteScheduler(shift=shift, **settings)
    scheduler.set_timesteps(num_steps)
    return scheduler


def exact_sigmas(num_steps: int, shift: float) -> torch.Tensor:
    line = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return shift * line / (1 + (shift - 1) * line)


@pytest.mark.parametrize("shift", [0.3, 1.0, 1.1, 5.0, 7.0, 20.0])
@pytest.mark.parametrize("num_steps", [1, 2, 20, 199])
def test_sigmas_are_the_shifted_line_from_exactly_one_to_exactly_zero(num_steps, shift):
    scheduler = scheduled(num_steps, shift=shift)
    expected = exact_sigmas(num_steps, shift).float()
    torch.testing.assert_close(scheduler.sigmas, expected, rtol=0, atol=1e-6)  # also its shape and dtype
    assert scheduler.sigmas[0] == 1 and scheduler.sigmas[-1] == 0 and (scheduler.sigmas.diff() < 0).all()
    assert scheduler.timesteps.dtype == torch.float32  # and unrounded
    assert torch.equal(scheduler.timesteps, scheduler.sigmas[:-1] * 1000)


def test_a_second_call_replaces_the_first_schedule_and_settings_survive_saving_and_loading(tmp_path):
    scheduler = scheduled(20)
    scheduler.set_timesteps(12)  # the official schedule
    expected = torch.tensor([1000.0, 982.1429, 961.5385, 937.5])
    torch.testing.assert_close(scheduler.timesteps[:4], expected, rtol=0, atol=1e-3)
    assert len(scheduler.timesteps) == len(scheduler.gradient_norms(sde_type="sage_grpo", eta=0.5)) == 12
    scheduler.set_timesteps(4, device="meta")
    assert scheduler.sigmas.is_meta
    scheduled(4, shift=7.0, sage_clamp=1e-2).save_pretrained(tmp_path)
    loaded = FlowMatchDiscreteScheduler.from_pretrained(tmp_path).config
    assert (loaded.shift, loaded.num_train_timesteps, loaded.sage_clamp) == (7.0, 1000, 1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"shift": shift}, f"shift > 0 .* got {shift}, 1000 and 0.003") for shift in (0.0, math.inf, math.nan)),
        *(({"sage_clamp": clamp}, f"sage_clamp .* got .* and {clamp}") for clamp in (0.0, 1.0)),
        ({"num_train_timesteps": 0}, "num_train_timesteps >= 1 .* got .*, 0 and"),
        ({"num_steps": 0}, "num_inference_steps must be at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused_and_steps_that_are_not_set_yet(settings, message):
    with pytest.raises(ValueError, match=message):
        scheduled(**{"num_steps": 1} | settings)
    with pytest.raises(ValueError, match="call set_timesteps"):
        FlowMatchDiscreteScheduler().gradient_norms(sde_type="cps", eta=0.5)


FLAVOURS = [name for name in SDE_TYPES if name != "ode"]
NUM_STEPS, SHAPE, ETA, CLAMP = 10, (3, 4, 2, 5, 5), 0.6, 3e-3
WRONG_NOISE = (("sage_grpo", -0.1), ("cps", 1.5), ("flow_grpo", math.inf))


@pytest.fixture
def scheduler():
    return scheduled(NUM_STEPS, shift=5.0)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    sample, velocity, noise = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    return sample, velocity, noise


def by_hand(sde_type, index, x, v):
    """Mean and std of the step from `x` with the velocity `v`."""
    sigma, sigma_next = exact_sigmas(NUM_STEPS, 5.0)[index : index + 2].tolist()
    x0_hat, x1_hat, clamped = x - sigma * v, x + (1 - sigma) * v, min(sigma, 1 - CLAMP)
    if sde_type == "cps":
        std = sigma_next * math.sin(ETA * math.pi / 2)
        return (1 - sigma_next) * x0_hat + math.sqrt(sigma_next**2 - std**2) * x1_hat, std
    integrals = {
        "dance_grpo": sigma - sigma_next,
        "flow_grpo": (sigma - sigma_next) * sigma / (1 - (sigma_next if index == 0 else sigma)),
        "sage_grpo": math.log((1 - sigma_next) / (1 - clamped)) - (clamped - sigma_next),
    }
    variance, score = ETA**2 * integrals[sde_type], -(x - (1 - sigma) * x0_hat) / sigma**2
    return x - (sigma - sigma_next) * v + 0.5 * variance * score, math.sqrt(variance)


@pytest.mark.parametrize("index", range(NUM_STEPS))
@pytest.mark.parametrize("sde_type", FLAVOURS)
def test_mean_and_std_follow_the_written_formula(scheduler, tensors, sde_type, index):
    sample, velocity, _ = tensors
    expected_mean, expected_std = by_hand(sde_type, index, sample.double(), velocity.double())
    mean, std = scheduler.transition(velocity, sample, index, sde_type=sde_type, eta=ETA)
    assert mean.dtype == std.dtype == torch.float32
    torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-5, atol=1e-5)
    assert std.shape == (1, 1, 1, 1, 1) and std.item() == pytest.approx(expected_std, rel=1e-5, abs=1e-9)
    sensitivity = scheduler.step_weights(sde_type=sde_type, eta=ETA).velocity[index]
    assert sensitivity.item() == pytest.approx(by_hand(sde_type, index, 0.0, 1.0)[0])  # the mean is linear in v


@pytest.mark.parametrize("sde_type", FLAVOURS)
def test_a_log_prob_is_the_mean_of_the_elements_log_densities_and_so_is_its_gradient(scheduler, tensors, sde_type):
    sample, velocity, noise = tensors
    mean, std = scheduler.transition(velocity, sample, torch.tensor([0, 4, 8]), sde_type=sde_type, eta=ETA)
    stored = scheduler.sample_next(mean, std, noise)
    assert torch.equal(stored, mean + std * noise)
    mean = (mean + 0.1 * sample).requires_grad_()
    log_prob = scheduler.log_prob(stored, mean, std, sde_type=sde_type)
    assert log_prob.shape == (SHAPE[0],)
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
def test_mixed_steps_equal_each_row_alone_bit_for_bit_and_are_in_float32(scheduler, tensors, sde_type):
    sample, velocity, noise = tensors
    how, rounded = {"sample": sample, "index": 3, "sde_type": sde_type, "eta": ETA}, velocity.bfloat16()
    mean, _ = scheduler.transition(rounded, **how)
    assert mean.dtype == torch.float32 and torch.equal(mean, scheduler.transition(rounded.float(), **how)[0])
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
    for index, delta in enumerate(-exact_sigmas(NUM_STEPS, 5.0).diff().float()):
        mean, std = scheduler.transition(velocity, sample, index, sde_type=sde_type, eta=0.0)
        assert std.count_nonzero() == 0
        euler, none = scheduler.transition(velocity, sample, index, sde_type="ode", eta=0.0)
        torch.testing.assert_close(mean, euler, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(euler, sample - delta * velocity)
        assert none.count_nonzero() == 0


def test_the_last_cps_step_and_the_first_sage_step_may_be_deterministic_and_are_not_trained(scheduler, tensors):
    sample, velocity, noise = tensors
    mean, std = scheduler.transition(velocity, sample, NUM_STEPS - 1, sde_type="cps", eta=ETA)
    stored = scheduler.sample_next(mean, std, noise)
    assert torch.equal(stored, mean)
    assert scheduler.log_prob(stored, mean, std, sde_type="cps").count_nonzero() == 0
    assert scheduler.trained_steps(sde_type="cps", eta=ETA).tolist() == [True] * (NUM_STEPS - 1) + [False]
    how = {"sde_type": "sage_grpo", "eta": 0.5}
    for num_steps, shift in ((68, 5.0), (49, 7.0), (38, 9.0)):  # from so many steps on the first lies above the clamp
        assert scheduled(num_steps - 1, shift).trained_steps(**how).all()
        assert scheduled(num_steps, shift).trained_steps(**how).tolist() == [False] + [True] * (num_steps - 1)
    scheduler = scheduled(50, shift=9.0)
    assert scheduler.gradient_norms(sde_type="sage_grpo", eta=0.5)[0] == 0
    sample, velocity = torch.randn(2, 6), torch.randn(2, 6, requires_grad=True)
    mean, std = scheduler.transition(velocity, sample, torch.tensor([0, 1]), sde_type="sage_grpo", eta=0.5)
    log_prob = scheduler.log_prob(mean + 0.1, mean, std, sde_type="sage_grpo")
    assert log_prob[0] == 0 and log_prob[1].isfinite()
    log_prob.sum().backward()
    assert [row.count_nonzero() for row in velocity.grad] == [0, 6]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"index": 10}, r"index must lie in 0\.\.9 for 10 steps, got 10"),
        ({"index": -1}, r"index must lie in 0\.\.9"),
        ({"index": torch.tensor([0, 1])}, r"LongTensor of shape \(3,\).*got torch.int64 of shape \(2,\)"),
        ({"index": torch.tensor([0.0, 1.0, 2.0])}, "got torch.float32"),
        ({"velocity": torch.ones(1, 4, 2, 5, 5)}, r"velocity \(1, 4, 2, 5, 5\) and sample \(3, 4, 2, 5, 5\)"),
        ({"sde_type": "sage_gpro"}, "'sage_gpro'.*sage_grpo, flow_grpo, dance_grpo, cps.*mean 'sage_grpo'"),
        *(({"sde_type": name, "eta": eta}, f"eta must be .*{name}.*got {eta}") for name, eta in WRONG_NOISE),
    ],
)
def test_what_names_no_step_of_a_flavour_is_refused(scheduler, tensors, changed, message):
    step = {"velocity": tensors[1], "sample": tensors[0], "index": 0, "sde_type": "sage_grpo", "eta": ETA}
    with pytest.raises(ValueError, match=message):
        scheduler.transition(**step | changed)
    with pytest.raises(ValueError, match="unknown sde_type"):
        scheduler.log_prob(tensors[0], tensors[0], torch.ones(1), sde_type="ddpm")
    scheduler.trained_steps(sde_type="cps", eta=1.0)


@pytest.mark.parametrize("sde_type", ["sage_grpo", "cps"])
def test_rows_without_noise_take_the_odes_step(scheduler, tensors, sde_type):
    sample, velocity, _ = tensors
    noisy = torch.tensor([True, False, True])
    mean, std = scheduler.transition(velocity, sample, 2, sde_type=sde_type, eta=0.5, noisy=noisy)
    with_noise, sde_std = scheduler.transition(velocity, sample, 2, sde_type=sde_type, eta=0.5)
    without, _ = scheduler.transition(velocity, sample, 2, sde_type="ode", eta=0.0)
    assert torch.equal(mean[noisy], with_noise[noisy]) and torch.equal(mean[~noisy], without[~noisy])
    assert std.flatten().tolist() == [sde_std.item(), 0.0, sde_std.item()]


@pytest.mark.parametrize("sde_type", FLAVOURS)
def test_no_variance_is_negative_for_any_schedule_and_that_of_the_first_flow_step_is_eta_squared(sde_type):
    for num_steps in range(1, 201):
        for shift in (0.3, 0.7, 1.0, 1.1, 2.5, 5.0, 7.0, 9.0, 13.0, 20.0):
            weights = scheduled(num_steps, shift).step_weights(sde_type=sde_type, eta=0.5)
            assert (weights.std >= 0).all() and torch.stack(weights).isfinite().all()
            assert sde_type != "flow_grpo" or weights.std[0].item() == pytest.approx(0.5, rel=5e-13)


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


@pytest.mark.parametrize("sde_type", FLAVOURS)
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
