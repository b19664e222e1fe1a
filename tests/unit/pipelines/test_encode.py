"""Prompts become what the stock pipeline makes of them, each alone and without padding."""

import torch
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from tests.support.pipelines import PROMPTS, load_stock_pipeline

ODD_PROMPTS = (
    *PROMPTS,
    "",  # encoded as a blank
    "“Straße” in curly quotes, naïve café 東京",
    "word " * 1200,  # more than the 1000 tokens that are kept
    f'a wall that says "{"long " * 100}"',  # more than the 256 bytes that are kept
)


def token_ids(pipeline: HunyuanVideoGRPOPipeline, prompt: str) -> list[int]:
    messages = format_text_input([prompt], pipeline.system_message)[0]
    return pipeline.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_a_prompt_is_encoded_the_same_alone_and_among_others(pipeline):
    together = pipeline.encode(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        alone = pipeline.encode([prompt])
        assert torch.equal(together.text[row], alone.text[0])
        assert torch.equal(together.glyph[row], alone.glyph[0])


def test_the_states_are_those_of_the_stock_pipeline_on_valid_tokens(pipeline, tiny_root):
    crop = len(token_ids(pipeline, "")) - len(pipeline.encode([""]).text[0])
    stock = load_stock_pipeline(tiny_root, crop)
    text, text_mask, glyph, glyph_mask = stock.encode_prompt(list(ODD_PROMPTS), batch_size=len(ODD_PROMPTS))
    ours = pipeline.encode(ODD_PROMPTS)
    assert [len(row) for row in ours.glyph[:4:2]] == [0, 0], "a prompt without quotes has no glyph rows"
    for row in range(len(ODD_PROMPTS)):
        torch.testing.assert_close(ours.text[row], text[row][text_mask[row].bool()], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.glyph[row], glyph[row][glyph_mask[row].bool()], rtol=1e-5, atol=1e-5)


def test_the_crop_ends_exactly_where_the_users_text_begins(pipeline):
    ids = token_ids(pipeline, PROMPTS[0])
    crop = len(ids) - len(pipeline.encode(PROMPTS[:1]).text[0])
    assert pipeline.tokenizer.decode(ids[:crop]).endswith("<|im_start|>user\n")
    assert pipeline.tokenizer.decode(ids[crop:]) == f"{PROMPTS[0]}<|im_end|>\n<|im_start|>assistant\n"


def test_the_negative_prompt_has_no_glyphs_even_where_it_quotes(pipeline):
    negative = pipeline.encode(['no "watermark"'], glyphs=False)
    assert len(negative.glyph[0]) == 0
    assert torch.equal(negative.text[0], pipeline.encode(['no "watermark"']).text[0])
