"""Image-to-video is what the stock pipeline makes of an image, and encodes it once."""

from pathlib import Path

import pytest
import torch
from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, HunyuanVideo15ImageToVideoPipeline
from PIL import Image

from hyvideo.data.prompts import Prompt
from hyvideo.models.loading import load_pipeline
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from tests.support.pipelines import NUM_STEPS, PROMPTS, VIDEO, load_tiny_pipeline, noise_of
from tests.support.tiny_model import SHIFT
from tests.support.training import noisy_image


@pytest.fixture
def pipeline(original_root: Path) -> HunyuanVideoGRPOPipeline:
    return load_tiny_pipeline(original_root, "480p_i2v")


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    """Two prompts of two lengths, each with an image of twice the videos' size."""
    for number in range(2):
        noisy_image(number, (64, 64)).save(tmp_path / f"{number}.png")
    return [Prompt(PROMPTS[i], i, None, str(tmp_path / f"{i}.png")) for i in range(2)]


@pytest.mark.parametrize(("version", "scale"), [("480p_i2v", 1.0), ("480p_i2v", 6.0), ("480p_i2v_step_distilled", 1.0)])
def test_latents_are_those_of_the_stock_pipeline(original_root, prompts, version, scale):
    pipeline = load_tiny_pipeline(original_root, version)
    guidance = Guidance(scale, pipeline.encode([""], glyphs=False))
    conditioning = pipeline.encode_prompts(prompts, (32, 32))
    ours = pipeline.rollout(conditioning, noise_of(2), guidance, **VIDEO, sde_type="ode", eta=0.0)
    kind = {"pipeline_class": HunyuanVideo15ImageToVideoPipeline}
    stock = load_pipeline(original_root, version, **kind, scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT))
    stock.guider = ClassifierFreeGuidance(guidance_scale=scale)
    stock.prompt_template_encode_start_idx, stock.target_size = pipeline.system_turn_length(), 32
    for row, prompt in enumerate(prompts):
        asked = {"prompt": prompt.text, "num_frames": 5, "num_inference_steps": NUM_STEPS, "output_type": "latent"}
        start = ours.latents[row : row + 1, 0]
        expected = stock(image=Image.open(prompt.ref_image_path), latents=start, **asked).frames
        error = (ours.latents[row : row + 1, -1] - expected).abs().max() / expected.abs().max()
        assert error <= 1e-5


def test_an_images_latents_are_less_the_vaes_shift(pipeline):
    plain = pipeline.encode_images([noisy_image(0)], (32, 48)).latents
    pipeline.vae.register_to_config(shift_factor=0.25)
    shifted = pipeline.encode_images([noisy_image(0)], (32, 48)).latents
    assert plain.shape == (1, 4, 2, 3)
    torch.testing.assert_close(shifted, plain - 0.25 * pipeline.vae.config.scaling_factor)


@torch.no_grad()
def test_a_step_distilled_model_is_told_where_the_step_leads(original_root, prompts):
    pipeline = load_tiny_pipeline(original_root, "480p_i2v_step_distilled")
    seen = []
    pipeline.transformer.time_embed.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0].tolist(), kwargs["timestep_r"].tolist())), with_kwargs=True
    )
    conditioning = pipeline.encode_prompts(prompts, (32, 32))
    pipeline.velocity(torch.zeros(2, 4, 2, 2, 2), torch.tensor([1, NUM_STEPS - 1]), conditioning, Guidance())
    times = pipeline.scheduler.timesteps.tolist()
    assert seen == [([times[1], times[3]], [times[2], 0.0])]


def test_prompts_of_the_other_task_are_refused(pipeline, tiny_root, prompts):
    with pytest.raises(ValueError, match="text-to-video model was given 2 of 2 prompts with an image"):
        load_tiny_pipeline(tiny_root).encode_prompts(prompts, (32, 32))
    with pytest.raises(ValueError, match="made for i2v; received conditioning with no image"):
        pipeline.velocity(torch.zeros(1, 4, 2, 2, 2), 0, pipeline.encode(["a cat"]), Guidance())


def test_large_videos_are_decoded_in_tiles_and_images_encoded_whole(pipeline):
    calls = []
    for network in (pipeline.vae.decoder, pipeline.vae.encoder):
        network.register_forward_pre_hook(lambda module, args: calls.append(tuple(args[0].shape[3:])))
    assert pipeline.decode(torch.zeros(1, 4, 1, 16, 20)).shape == (1, 1, 256, 320, 3)
    assert calls == [(16, 16), (16, 6), (2, 16), (2, 6)]  # 256 pixels, every 224: an eighth overlaps
    calls.clear()
    pipeline.encode_images([noisy_image(0)], (256, 320))
    assert calls == [(256, 320)]
