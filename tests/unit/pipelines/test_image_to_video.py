"""Image-to-video is what the stock pipeline makes of an image; sizes and settings are the authors' or the model's."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, HunyuanVideo15ImageToVideoPipeline
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hyvideo.data.prompts import Prompt
from hyvideo.models.loading import load_pipeline
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline, check_task, crop_to_size
from hyvideo.pipelines.sampling_defaults import FILE, HUNYUAN_480P_T2V, bucket_size, sampling_defaults
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


def test_prompts_of_the_other_task_are_refused_and_latents_are_less_the_vaes_shift(pipeline, tiny_root, prompts):
    with pytest.raises(ValueError, match="text-to-video model was given 2 of 2 prompts with an image"):
        load_tiny_pipeline(tiny_root).encode_prompts(prompts, (32, 32))
    with pytest.raises(ValueError, match="made for i2v; received conditioning with no image"):
        pipeline.velocity(torch.zeros(1, 4, 2, 2, 2), 0, pipeline.encode(["a cat"]), Guidance())
    plain = pipeline.encode_images([noisy_image(0)], (32, 48)).latents
    pipeline.vae.register_to_config(shift_factor=0.25)
    shifted = pipeline.encode_images([noisy_image(0)], (32, 48)).latents
    assert plain.shape == (1, 4, 2, 3)
    torch.testing.assert_close(shifted, plain - 0.25 * pipeline.vae.config.scaling_factor)


def test_large_videos_are_decoded_in_tiles_and_images_encoded_whole(pipeline):
    calls = []
    for network in (pipeline.vae.decoder, pipeline.vae.encoder):
        network.register_forward_pre_hook(lambda module, args: calls.append(tuple(args[0].shape[3:])))
    assert pipeline.decode(torch.zeros(1, 4, 1, 16, 20)).shape == (1, 1, 256, 320, 3)
    assert calls == [(16, 16), (16, 6), (2, 16), (2, 6)]  # 256 pixels, every 224: an eighth overlaps
    calls.clear()
    pipeline.encode_images([noisy_image(0)], (256, 320))
    assert calls == [(256, 320)]


SIZES = """640 16:9 480x848; 640 9:16 848x480; 640 1:1 640x640; 640 4:3 544x720; 640 21:9 416x976; 640 1000:777 560x720;
960 16:9 720x1280; 960 3:4 1104x832; 960 848:480 720x1280"""


def test_ratios_have_the_published_sizes():
    for line in SIZES.split(";"):
        base, width, height, *size = map(int, re.findall(r"\d+", line))
        assert bucket_size(base, 16, width=width, height=height) == tuple(size)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_every_ratio_has_a_size_of_about_the_models_number_of_pixels(width, height):
    size = bucket_size(640, 16, width=width, height=height)
    assert all(side % 16 == 0 for side in size) and 0.85 * 640**2 <= size[0] * size[1] <= 640**2


def test_the_centre_is_kept_and_an_image_of_the_size_is_untouched():
    pixels = np.zeros((40, 90, 3), dtype=np.uint8)
    pixels[:, 30:60] = 255
    cropped = crop_to_size(Image.fromarray(pixels), (40, 30))
    assert np.array_equal(np.array(cropped), pixels[:, 30:60])
    whole = Image.fromarray(pixels)
    assert np.array_equal(np.array(crop_to_size(whole, (40, 90))), pixels)


@given(st.integers(1, 80), st.integers(1, 80), st.sampled_from([(16, 16), (32, 48), (48, 16)]))
def test_every_image_becomes_the_size(width, height, size):
    cropped = crop_to_size(Image.new("RGB", (width, height), (10, 20, 30)), size)
    assert (cropped.height, cropped.width) == size
    assert np.array(cropped).reshape(-1, 3).tolist() == [[10, 20, 30]] * (size[0] * size[1])


# version folder, ideal_resolution, ideal_task, use_meanflow -> guidance, shift, steps, size (the authors' table)
PUBLISHED = {
    ("480p_t2v", "480p", "t2v", False): (6.0, 5.0, 50, "480x848"),
    ("480p_i2v", "480p", "i2v", False): (6.0, 5.0, 50, "480x848"),
    ("720p_t2v", "720p", "t2v", False): (6.0, 9.0, 50, "720x1280"),
    ("720p_i2v", "720p", "i2v", False): (6.0, 7.0, 50, "720x1280"),
    ("480p_t2v_distilled", "480p", "t2v", False): (1.0, 5.0, 50, "480x848"),
    ("720p_i2v_distilled_sparse", "720p", "i2v", False): (1.0, 7.0, 50, "720x1280"),
    ("480p_i2v_step_distilled", "480p", "i2v", True): (1.0, 7.0, 12, "480x848"),
    ("my_export", "720p", "t2v", False): (6.0, 9.0, 50, "720x1280"),
}


def write_version(root: Path, version: str, **config: object) -> Path:
    folder = root / "transformer" / version
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize(("key", "expected"), PUBLISHED.items(), ids=str)
def test_published_versions_are_sampled_as_their_authors_do(tmp_path, key, expected):
    version, resolution, task, meanflow = key
    root = write_version(tmp_path, version, ideal_resolution=resolution, ideal_task=task, use_meanflow=meanflow)
    defaults = sampling_defaults(root, version)
    names = ("guidance_scale", "shift", "num_inference_steps", "fixed_size")
    assert tuple(defaults[name] for name in names) == expected and defaults["video_length"] == 121
    assert sampling_defaults(root) == defaults  # the only version there


def test_a_diffusers_model_carries_them_or_its_own_file_and_what_is_not_those_settings_is_named(tiny_root, tmp_path):
    own = {"shift": 3.0, "guidance_scale": 1.0, "fixed_size": "16x32"}
    assert sampling_defaults(tiny_root) == HUNYUAN_480P_T2V | own
    with pytest.raises(ValueError, match="received '1080p' 't2v'"):
        sampling_defaults(write_version(tmp_path, "x", ideal_resolution="1080p", ideal_task="t2v"))
    own = HUNYUAN_480P_T2V | {"guidance_scale": 1.0, "fixed_size": "64x64"}
    (tmp_path / FILE).write_text(json.dumps(own))
    assert sampling_defaults(tmp_path) == own
    for content in ('{"shift": 3.0}', "[1, 2]", "not json", ""):
        (tmp_path / FILE).write_text(content)
        with pytest.raises(ValueError, match=FILE):
            sampling_defaults(tmp_path)


def test_prompts_are_those_the_model_takes():
    plain, started = Prompt("a cat", 3, None, None), Prompt("a dog", 4, None, "a.png")
    check_task([plain], "t2v")
    check_task([started], "i2v")
    with pytest.raises(ValueError, match="1 of 2 prompts without an image .*, the first being index 3: 'a cat'"):
        check_task([started, plain], "i2v")
    with pytest.raises(ValueError, match="1 of 2 prompts with an image .*, the first being index 4: 'a dog'"):
        check_task([plain, started], "t2v")
