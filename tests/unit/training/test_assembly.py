"""What a configuration says reaches the part that it is about."""

from collections.abc import Callable

import pytest
import torch

from hyvideo.evaluation.sampling import sample_prompts
from hyvideo.grpo.gradient_equalizer import equalizer_scales
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.training.assembly import build_pipeline
from hyvideo.training.trainer import Trainer


@pytest.mark.parametrize("sde_type", ["sage_grpo", "dance_grpo", "flow_grpo", "cps"])
def test_the_equalizer_is_that_of_the_runs_own_steps(make_trainer: Callable[..., Trainer], sde_type: str):
    trainer = make_trainer(sde_type=sde_type, eta=0.3, sage_clamp=0.02, kl_target=0.07)
    scheduler = FlowMatchDiscreteScheduler(shift=3.0, sage_clamp=0.02)
    scheduler.set_timesteps(4)
    assert torch.equal(trainer.update.scales, equalizer_scales(scheduler.gradient_norms(sde_type=sde_type, eta=0.3)))
    assert trainer.state.controller.target == 0.07


@pytest.mark.parametrize(("offload", "place"), [(False, "meta"), (True, "cpu")])
def test_encoders_go_to_the_runs_device_unless_they_rest(
    make_trainer: Callable[..., Trainer], offload: bool, place: str
):
    trainer = make_trainer(encoder_offload=offload)
    pipeline = build_pipeline(trainer.config, torch.device("meta"), trainer.mesh)
    assert pipeline.encoder_offload == offload
    assert {encoder.device.type for encoder in pipeline.encoders} == {place}
    assert pipeline.vae.device.type == pipeline.transformer.device.type == "meta"


def test_the_seed_draws_a_fresh_adapter(make_trainer: Callable[..., Trainer]):
    first, second = (make_trainer(use_lora=True, seed=seed).update.parameters[0] for seed in (42, 43))
    assert not torch.equal(first, second)


def test_validation_videos_have_settings_of_their_own(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(
        cfg_scale=4.0,
        validation_interval=1,
        validate_video_length=9,
        validation_fixed_size="48x32",
        validation_timestep_shift=7.0,
        validation_global_seed=5,
    )
    scheduler = FlowMatchDiscreteScheduler(shift=7.0)
    scheduler.set_timesteps(2)
    pipeline, prompts = trainer.update.pipeline.with_scheduler(scheduler), trainer.validation.prompts
    guidance = Guidance(4.0, pipeline.encode([""], glyphs=False))
    expected = sample_prompts(pipeline, prompts, guidance, num_frames=9, size=(48, 32), seed=5, batch_size=2)
    received = trainer.validation.sample(prompts).videos
    assert received.shape == (2, 9, 48, 32, 3)
    assert torch.equal(received, expected)
