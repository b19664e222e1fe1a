"""One denoising step, the rollout and the ODE: guidance by hand, the stock pipeline, and what a rollout records."""

import pytest
import torch
from diffusers import ClassifierFreeGuidance
from torch import Tensor

from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Conditioning, Guidance, HunyuanVideoGRPOPipeline
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from tests.support.pipelines import NUM_STEPS, PROMPTS, VIDEO, load_stock_pipeline, noise_of

STEPS = torch.tensor([3, 0, 2])


@pytest.fixture
def latents() -> Tensor:
    return torch.randn(3, 4, 2, 2, 2, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def conditioning(pipeline: HunyuanVideoGRPOPipeline) -> Conditioning:
    return pipeline.encode(PROMPTS)


@pytest.fixture
def guidance(pipeline: HunyuanVideoGRPOPipeline) -> Guidance:
    return Guidance(6.0, pipeline.encode([""], glyphs=False))


def largest_relative_error(received: Tensor, expected: Tensor) -> float:
    return float((received - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("index", [1, STEPS], ids=["one step for all", "a step per sample"])
@torch.no_grad()
def test_guidance_is_the_formula_over_single_unguided_calls(pipeline, latents, conditioning, guidance, index):
    expected = []
    for row in range(3):
        step = index if isinstance(index, int) else int(index[row])
        alone = latents[row : row + 1]
        prompted = pipeline.velocity(alone, step, conditioning.rows([row]), Guidance())
        negative = pipeline.velocity(alone, step, guidance.negative, Guidance())
        expected.append(negative + 6.0 * (prompted - negative))
    received = pipeline.velocity(latents, index, conditioning, guidance)
    assert largest_relative_error(received, torch.cat(expected)) <= 1e-5


@torch.no_grad()
def test_guidance_takes_one_transformer_call_and_a_negative_prompt_and_scale_1_no_second_row(
    pipeline, latents, conditioning, guidance
):
    rows = []
    pipeline.transformer.register_forward_hook(lambda module, args, output: rows.append(len(output[0])))
    pipeline.velocity(latents, 0, conditioning, guidance)
    pipeline.velocity(latents, 0, conditioning, Guidance(1.0, guidance.negative))
    assert rows == [6, 3]
    with pytest.raises(ValueError, match=r"scale 6\.0 needs a negative conditioning"):
        Guidance(6.0)


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_ode_latents_are_those_of_the_stock_pipeline(pipeline, tiny_root, scale):
    conditioning = pipeline.encode(PROMPTS)
    guidance = Guidance(scale, pipeline.encode([""], glyphs=False))
    ours = pipeline.rollout(conditioning, noise_of(3), guidance, **VIDEO, sde_type="ode", eta=0.0)

    stock = load_stock_pipeline(tiny_root, pipeline.system_turn_length())
    stock.guider = ClassifierFreeGuidance(guidance_scale=scale)
    expected = stock(
        prompt=list(PROMPTS),
        num_frames=5,
        height=32,
        width=32,
        num_inference_steps=NUM_STEPS,
        latents=ours.latents[:, 0],
        output_type="latent",
    ).frames
    assert largest_relative_error(ours.latents[:, -1], expected) <= 1e-5


@pytest.mark.parametrize("shift", [0.0, 0.25])
@torch.no_grad()
def test_videos_are_the_stock_vaes_to_one_grey_level(pipeline, tiny_root, latents, shift):
    stock = load_stock_pipeline(tiny_root, crop=0)
    pipeline.vae.register_to_config(shift_factor=shift)
    decoded = [stock.vae.decode(row / stock.vae.config.scaling_factor + shift).sample for row in latents.split(1)]
    expected = stock.video_processor.postprocess_video(torch.cat(decoded), output_type="pt") * 255
    videos = pipeline.decode(latents)
    assert videos.dtype == torch.uint8
    assert videos.shape == (3, 5, 32, 32, 3)
    assert (videos - expected.permute(0, 1, 3, 4, 2)).abs().max() <= 0.51


def test_only_the_last_latents_may_be_kept(pipeline, conditioning):
    steps, ode = [], {**VIDEO, "sde_type": "ode", "eta": 0.0}
    alone = pipeline.rollout(conditioning, noise_of(3), Guidance(), **ode, only_last=True, on_step=steps.append)
    rollout = pipeline.rollout(conditioning, noise_of(3), Guidance(), **ode)
    assert torch.equal(alone.videos, rollout.videos)
    assert torch.equal(alone.latents, rollout.latents[:, -1:]) and alone.means is None and alone.log_probs is None
    assert steps == list(range(NUM_STEPS))


@pytest.mark.parametrize("sde_type", ["sage_grpo", "dance_grpo", "flow_grpo", "cps"])
def test_a_rollout_records_exactly_what_it_did(pipeline, conditioning, guidance, sde_type):
    noise, shape = noise_of(3), (4, 2, 2, 2)
    rollout = pipeline.rollout(conditioning, noise, guidance, **VIDEO, sde_type=sde_type, eta=0.5)
    assert rollout.latents.shape == (3, NUM_STEPS + 1, *shape)
    assert torch.equal(rollout.latents[:, 0], noise.initial(shape))
    assert torch.equal(rollout.videos, pipeline.decode(rollout.latents[:, -1]))
    for index in range(NUM_STEPS):
        here, following = rollout.latents[:, index], rollout.latents[:, index + 1]
        mean, std = pipeline.denoise_step(here, index, conditioning, guidance, sde_type=sde_type, eta=0.5)
        assert torch.equal(mean, rollout.means[:, index])
        assert torch.equal(following, mean + std * noise.step(index, shape))
        log_prob = pipeline.scheduler.log_prob(following, mean, std, sde_type=sde_type)
        assert torch.equal(log_prob, rollout.log_probs[:, index])
    assert not rollout.latents.requires_grad


def test_a_denoising_step_carries_gradient_to_the_policy(pipeline, latents, conditioning, guidance):
    mean, _ = pipeline.denoise_step(latents, STEPS, conditioning, guidance, sde_type="sage_grpo", eta=0.5)
    mean.sum().backward()
    assert pipeline.transformer.proj_out.weight.grad.abs().sum() > 0


def test_latents_are_16_times_smaller_in_space_and_4_times_in_time_or_there_are_none(pipeline):
    for num_frames, size, shape in ((1, (16, 16), (4, 1, 1, 1)), (121, (480, 848), (4, 31, 30, 53))):
        assert pipeline.latent_shape(num_frames, size) == shape
    for num_frames, size in ((6, (32, 32)), (0, (32, 32)), (5, (30, 32)), (5, (32, 0))):
        with pytest.raises(ValueError, match=rf"multiples of 16 pixels; received {num_frames} frames of {size[0]}x"):
            pipeline.latent_shape(num_frames, size)


def test_another_schedule_shares_the_models(pipeline):
    pipeline.autocast_dtype = torch.bfloat16
    scheduler = FlowMatchDiscreteScheduler(shift=7.0)
    other = pipeline.with_scheduler(scheduler)
    assert other.scheduler is scheduler
    assert pipeline.scheduler is not scheduler
    assert other.transformer is pipeline.transformer
    assert other.autocast_dtype == torch.bfloat16


@torch.no_grad()
def test_half_precision_keeps_latents_and_velocity_in_float32(pipeline, latents, conditioning):
    exact = pipeline.velocity(latents, 1, conditioning, Guidance())
    pipeline.autocast_dtype = torch.bfloat16
    rounded = pipeline.velocity(latents, 1, conditioning, Guidance())
    assert rounded.dtype == torch.float32
    assert 0 < largest_relative_error(rounded, exact) < 0.1
