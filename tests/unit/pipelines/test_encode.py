"""Prompts become what the stock pipeline makes of them, each alone, without padding; one that is cut is told."""

from collections.abc import Callable

import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

from hyvideo.data.prompts import Prompt
from hyvideo.pipelines.conditioning import Conditioning, FirstFrames
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.pipelines.prompt_lengths import truncated_prompts_warning
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


def test_a_prompt_is_encoded_the_same_alone_and_among_others_and_a_negative_one_without_glyphs(pipeline):
    prompts = [*PROMPTS, 'no "watermark"']
    together = pipeline.encode(prompts)
    for row, prompt in enumerate(prompts):
        alone = pipeline.encode([prompt])
        assert torch.equal(together.text[row], alone.text[0]) and torch.equal(together.glyph[row], alone.glyph[0])
    negative = pipeline.encode(prompts[-1:], glyphs=False)
    assert len(negative.glyph[0]) == 0 and torch.equal(negative.text[0], together.text[-1])


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


TEXT = tuple(torch.full((length, 3), float(length)) for length in (4, 2, 5))
GLYPH = tuple(torch.full((length, 2), -1.0 - length) for length in (0, 3, 1))


def test_rows_are_picked_in_any_order_with_repeats_and_a_negative_row_follows_for_every_row():
    positive, negative = Conditioning(TEXT[:2], GLYPH[:2]), Conditioning(TEXT[2:], GLYPH[2:])
    for received, rows in (
        (Conditioning(TEXT, GLYPH).rows([1, 0, 1]), [1, 0, 1]),
        (positive.with_negative(negative), [0, 1, 2, 2]),
        (negative.with_negative(positive.rows([1])), [2, 1]),
    ):
        assert len(received) == len(rows)
        assert all(torch.equal(text, TEXT[row]) for text, row in zip(received.text, rows, strict=True))
        assert all(torch.equal(glyph, GLYPH[row]) for glyph, row in zip(received.glyph, rows, strict=True))


def test_rows_and_negatives_keep_the_image_of_their_sample():
    images = FirstFrames(torch.arange(3.0)[:, None, None], -torch.arange(3.0)[:, None, None, None])
    conditioning = Conditioning(TEXT, GLYPH, images).rows([2, 0])
    guided = conditioning.with_negative(Conditioning(TEXT[:1], GLYPH[:1]))
    for received, expected in ((conditioning, [2, 0]), (guided, [2, 0, 2, 0])):
        assert received.images.states.flatten().tolist() == expected
        assert (-received.images.latents).flatten().tolist() == expected


@pytest.fixture
def told(pipeline: HunyuanVideoGRPOPipeline) -> Callable[..., str | None]:
    """What is said of some texts."""
    return lambda *texts: truncated_prompts_warning(pipeline, [Prompt(text, 0, None, None) for text in texts])


def words_of(pipeline: HunyuanVideoGRPOPipeline, num_tokens: int) -> str:
    """A text of exactly so many tokens."""
    text = "a" + " red" * num_tokens
    ids = pipeline.tokenizer(text, add_special_tokens=False).input_ids[:num_tokens]
    return pipeline.tokenizer.decode(ids)


def test_the_limit_is_the_encoders_own(pipeline, told):
    whole, cut = words_of(pipeline, 1000), words_of(pipeline, 1001)
    many = told(*(f"{number} " + "red " * 1200 for number in range(20)), "0 " + "red " * 1200)
    assert many.startswith("20 prompt(s)") and many.endswith("; ...") and many.count(" tokens of ") == 5
    assert told(whole) is None
    assert "1 prompt(s)" in told(whole, cut) and "1,001 tokens of 1,000 in 'a red red" in told(whole, cut)
    text = words_of(pipeline, 1100)
    full, longer = (pipeline.encode([text + end]).text[0] for end in ("", "!"))
    assert full.equal(longer)  # its end is not seen


def test_quoted_texts_have_a_limit_of_their_own(pipeline, told):
    around = len('Text "". ')
    whole, cut = (f'a wall that says "{"x" * (length - around)}"' for length in (255, 256))
    assert told(whole) is None
    assert "256 quoted bytes of 255 in 'a wall" in told(cut)
    both = told(cut + " red" * 1000)  # is one prompt
    assert both.startswith("1 prompt(s)") and " tokens of 1,000 and 256 quoted bytes of 255 in 'a wall" in both
    assert pipeline.tokenizer_2(f'Text "{"x" * (255 - around)}". ').input_ids[-1] == pipeline.tokenizer_2.eos_token_id
    assert len(pipeline.encode([whole]).glyph[0]) == 256


def test_training_says_it_when_it_begins(make_training, tmp_path, capsys):
    csv = tmp_path / "long.csv"
    csv.write_text("prompt\na red circle\nblue " + "square " * 1200 + "\n")
    make_training(train_video_csv=csv)
    assert "WARNING: 1 prompt(s) are longer than the model reads" in capsys.readouterr().err
