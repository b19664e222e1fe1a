"""The noise levels, timesteps and settings of the scheduler."""

import pytest
import torch

from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler


def scheduled(num_steps: int, **settings: float) -> FlowMatchDiscreteScheduler:
    scheduler = FlowMatchDiscreteScheduler(**settings)
    scheduler.set_timesteps(num_steps)
    return scheduler


@pytest.mark.parametrize("shift", [0.3, 1.0, 1.1, 5.0, 7.0, 20.0])
@pytest.mark.parametrize("num_steps", [1, 2, 20, 199])
def test_sigmas_are_the_shifted_line_from_exactly_one_to_exactly_zero(num_steps, shift):
    scheduler = scheduled(num_steps, shift=shift)
    line = [1 - i / num_steps for i in range(num_steps + 1)]
    expected = torch.tensor([shift * s / (1 + (shift - 1) * s) for s in line])
    assert scheduler.sigmas.shape == (num_steps + 1,)
    assert scheduler.sigmas.dtype == torch.float32
    torch.testing.assert_close(scheduler.sigmas, expected, rtol=0, atol=1e-6)
    assert scheduler.sigmas[0] == 1
    assert scheduler.sigmas[-1] == 0
    assert (scheduler.sigmas.diff() < 0).all()
    assert scheduler.timesteps.dtype == torch.float32  # and unrounded
    assert torch.equal(scheduler.timesteps, scheduler.sigmas[:-1] * 1000)


def test_the_official_schedule_of_twelve_steps_at_shift_five():
    timesteps = scheduled(12, shift=5.0).timesteps
    torch.testing.assert_close(timesteps[:4], torch.tensor([1000.0, 982.1429, 961.5385, 937.5]), rtol=0, atol=1e-3)


def test_a_second_call_replaces_the_first_schedule():
    scheduler = scheduled(20)
    scheduler.set_timesteps(4)
    assert len(scheduler.timesteps) == 4
    assert len(scheduler.gradient_norms(sde_type="sage_grpo", eta=0.5)) == 4
    scheduler.set_timesteps(4, device="meta")
    assert scheduler.sigmas.is_meta


def test_settings_survive_saving_and_loading(tmp_path):
    FlowMatchDiscreteScheduler(shift=7.0, sage_clamp=1e-2).save_pretrained(tmp_path)
    loaded = FlowMatchDiscreteScheduler.from_pretrained(tmp_path)
    assert (loaded.config.shift, loaded.config.num_train_timesteps, loaded.config.sage_clamp) == (7.0, 1000, 1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shift": 0.0}, "shift must be a positive number .* got 0.0"),
        ({"shift": float("nan")}, "shift .* got nan"),
        ({"num_train_timesteps": 0}, "num_train_timesteps .* got 0"),
        ({"sage_clamp": 0.0}, "sage_clamp .* got 0.0"),
        ({"sage_clamp": 1.0}, "sage_clamp .* got 1.0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FlowMatchDiscreteScheduler(**settings)


def test_no_steps_are_refused_and_using_the_scheduler_before_they_are_set_says_what_to_call():
    with pytest.raises(ValueError, match="num_inference_steps must be at least 1, got 0"):
        FlowMatchDiscreteScheduler().set_timesteps(0)
    with pytest.raises(ValueError, match="call set_timesteps"):
        FlowMatchDiscreteScheduler().gradient_norms(sde_type="cps", eta=0.5)
