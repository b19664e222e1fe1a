"""assets/tiny is a real, small HunyuanVideo-1.5 in the diffusers layout, prompt template included."""

import re
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

from scripts.tiny.components import PROMPT_TOKENS, build_tokenizer, encode_prompts
from scripts.tiny.prompts import ALL_SCENES, WORDINGS, prompt

BUNDLED = Path(__file__).parents[3] / "assets" / "tiny"
PROMPTS = ["a red circle moves slowly to the left", "the blue cross glides upwards quickly"]


@pytest.fixture(scope="module")
def pipeline() -> HunyuanVideo15Pipeline:
    return HunyuanVideo15Pipeline.from_pretrained(BUNDLED, torch_dtype=torch.float32)


def test_the_weights_are_bf16_and_at_most_32_megabytes(pipeline: HunyuanVideo15Pipeline) -> None:
    assert sum(file.stat().st_size for file in BUNDLED.rglob("*.safetensors")) <= 32e6
    loaded = HunyuanVideo15Pipeline.from_pretrained(BUNDLED, torch_dtype=torch.bfloat16)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        exact = zip(getattr(pipeline, name).parameters(), getattr(loaded, name).parameters(), strict=True)
        assert all(torch.equal(full, half.float()) for full, half in exact)


def test_the_system_turn_has_the_length_that_the_stock_pipeline_crops(pipeline: HunyuanVideo15Pipeline) -> None:
    text = pipeline.tokenizer.apply_chat_template(
        [{"role": "system", "content": pipeline.system_message}, {"role": "user", "content": "X"}], tokenize=False
    )
    start = len(pipeline.tokenizer(re.split("X", text)[0]).input_ids)
    assert start == pipeline.prompt_template_encode_start_idx


def test_training_encodes_prompts_as_the_stock_pipeline_does(pipeline: HunyuanVideo15Pipeline) -> None:
    stock, stock_mask = pipeline._get_mllm_prompt_embeds(pipeline.text_encoder, pipeline.tokenizer, PROMPTS, "cpu")
    ours, mask = encode_prompts(build_tokenizer(), pipeline.text_encoder, PROMPTS)
    assert torch.equal(mask.sum(1), stock_mask.sum(1).float())
    torch.testing.assert_close(ours, stock[:, : ours.shape[1]] * mask[..., None], rtol=1e-5, atol=1e-5)
    assert ours[mask.bool()].std().item() == pytest.approx(1, abs=0.2), "an embedding has about unit scale"


def test_no_prompt_is_cut(pipeline: HunyuanVideo15Pipeline) -> None:
    every = [prompt(scene, wording) for scene in ALL_SCENES for wording in range(len(WORDINGS))]
    with_system_turn = pipeline.tokenizer.apply_chat_template(
        format_text_input(every, pipeline.system_message), add_generation_prompt=True, return_dict=True
    )
    longest = max(map(len, with_system_turn["input_ids"])) - pipeline.prompt_template_encode_start_idx
    assert longest == PROMPT_TOKENS


def test_the_stock_pipeline_makes_a_video(pipeline: HunyuanVideo15Pipeline) -> None:
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(PROMPTS[0], height=64, width=64, num_frames=17, num_inference_steps=1, output_type="pt").frames
    assert frames.shape == (1, 17, 3, 64, 64) and frames.isfinite().all()


def test_latents_of_rendered_clips_have_unit_spread(pipeline: HunyuanVideo15Pipeline) -> None:
    from hyvideo.models.loading import allow_batches
    from scripts.tiny.train_vae import held_out_psnr

    psnr, latents = held_out_psnr(allow_batches(pipeline.vae))
    assert psnr >= 28
    assert (latents * pipeline.vae.config.scaling_factor).std().item() == pytest.approx(1, abs=0.1)
    assert latents.mean().abs() < 0.3 * latents.std()
