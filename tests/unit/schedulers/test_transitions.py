"""The schedule, and each transition against its formula by hand in float64 and torch's Normal."""

import math

import pytest
import torch

from hyvideo.schedulers.scheduling_flow_match_discrete import SDE_TYPES, FlowMatchDiscreteScheduler


@pytest.mark.parametrize("shift", [0.3, 1.0, 1.1, 5.0, 7.0, 20.0])
@pytest.mark.parametrize("num_steps", [1, 2, 20, 199])
def test_sigmas_are_the_shifted_line_from_exactly_one_to_exactly_zero(num_steps, shift):
    scheduler = scheduled(num_steps, shift=shift)
    line = [1 - i / num_steps for i in range(num_steps + 1)]
    expected = torch.tensor([shift * s / (1 + (shift - 1) * s) for s in line])
    torch.testing.assert_close(scheduler.sigmas, expected, rtol=0, atol=1e-6)  # also its shape and dtype
    assert scheduler.sigmas[0] == 1 and scheduler.sigmas[-1] == 0
    assert (scheduler.sigmas.diff() < 0).all()
    assert scheduler.timesteps.dtype == torch.float32  # and unrounded
    assert torch.equal(scheduler.timesteps, scheduler.sigmas[:-1] * 1000)


def test_a_second_call_replaces_the_first_schedule_and_settings_survive_saving_and_loading(tmp_path):
    scheduler = scheduled(20, shift=5.0, sage_clamp=1e-2)
    scheduler.set_timesteps(12)  # the official schedule
    expected = torch.tensor([1000.0, 982.1429, 961.5385, 937.5])
    torch.testing.assert_close(scheduler.timesteps[:4], expected, rtol=0, atol=1e-3)
    assert len(scheduler.timesteps) == len(scheduler.gradient_norms(sde_type="sage_grpo", eta=0.5)) == 12
    scheduler.set_timesteps(4, device="meta")
    assert scheduler.sigmas.is_meta
    scheduler.save_pretrained(tmp_path)
    loaded = FlowMatchDiscreteScheduler.from_pretrained(tmp_path).config
    assert (loaded.shift, loaded.num_train_timesteps, loaded.sage_clamp) == (5.0, 1000, 1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"shift": shift}, f"shift must be a positive number .* got {shift}") for shift in (0.0, math.nan)),
        *(({"sage_clamp": clamp}, f"sage_clamp .* got {clamp}") for clamp in (0.0, 1.0)),
        ({"num_train_timesteps": 0}, "num_train_timesteps .* got 0"),
        ({"num_steps": 0}, "num_inference_steps must be at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused_and_steps_that_are_not_set_yet(settings, message):
    with pytest.raises(ValueError, match=message):
        scheduled(**{"num_steps": 1} | settings)
    with pytest.raises(ValueError, match="call set_timesteps"):
        FlowMatchDiscreteScheduler().gradient_norms(sde_type="cps", eta=0.5)


FLAVOURS = [name for name in SDE_TYPES if name != "ode"]
NUM_STEPS, SHAPE, ETA = 10, (3, 4, 2, 5, 5), 0.6
WRONG_NOISE = (("sage_grpo", -0.1), ("cps", 1.5), ("flow_grpo", math.inf))


def scheduled(num_steps: int, **settings: float) -> FlowMatchDiscreteScheduler:
    scheduler = FlowMatchDiscreteScheduler(**settings)
    scheduler.set_timesteps(num_steps)
    return scheduler


@pytest.fixture
def scheduler():
    return scheduled(NUM_STEPS, shift=5.0)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    sample, velocity, noise = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    return sample, velocity, noise


def sigma_at(index: int) -> float:
    line = 1 - index / NUM_STEPS
    return 5 * line / (1 + 4 * line)


def by_hand(sde_type, index, x, v):
    """Mean and std of the step from `x` with the velocity `v`."""
    sigma, sigma_next = sigma_at(index), sigma_at(index + 1)
    x0_hat, x1_hat, clamped = x - sigma * v, x + (1 - sigma) * v, min(sigma, 1 - 3e-3)
    if sde_type == "cps":
        std = sigma_next * math.sin(ETA * math.pi / 2)
        return (1 - sigma_next) * x0_hat + math.sqrt(sigma_next**2 - std**2) * x1_hat, std
    variance = (
        ETA**2
        * {
            "dance_grpo": sigma - sigma_next,
            "flow_grpo": (sigma - sigma_next) * sigma / (1 - (sigma_next if index == 0 else sigma)),
            "sage_grpo": math.log((1 - sigma_next) / (1 - clamped)) - (clamped - sigma_next),
        }[sde_type]
    )
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
    for index in range(NUM_STEPS):
        mean, std = scheduler.transition(velocity, sample, index, sde_type=sde_type, eta=0.0)
        assert std.count_nonzero() == 0
        euler, none = scheduler.transition(velocity, sample, index, sde_type="ode", eta=0.0)
        torch.testing.assert_close(mean, euler, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(euler, sample - (sigma_at(index) - sigma_at(index + 1)) * velocity)
        assert none.count_nonzero() == 0


def test_the_last_cps_step_and_the_first_sage_step_may_be_deterministic_and_are_not_trained(scheduler, tensors):
    sample, velocity, noise = tensors
    mean, std = scheduler.transition(velocity, sample, NUM_STEPS - 1, sde_type="cps", eta=ETA)
    stored = scheduler.sample_next(mean, std, noise)
    assert torch.equal(stored, mean)
    assert scheduler.log_prob(stored, mean, std, sde_type="cps").count_nonzero() == 0
    assert scheduler.trained_steps(sde_type="cps", eta=ETA).tolist() == [True] * (NUM_STEPS - 1) + [False]
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
