"""A prompt of which the encoders read a part alone is told; what they read whole is not."""

from collections.abc import Callable

import pytest

from hyvideo.data.prompts import Prompt
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.pipelines.sampling import truncated_prompts_warning


@pytest.fixture
def told(pipeline: HunyuanVideoGRPOPipeline) -> Callable[..., str | None]:
    """What is said of some texts."""
    return lambda *texts: truncated_prompts_warning(
        pipeline, [Prompt(text, row, None, None) for row, text in enumerate(texts)]
    )


def words_of(pipeline: HunyuanVideoGRPOPipeline, num_tokens: int) -> str:
    """A text of exactly so many tokens."""
    text = "a" + " red" * num_tokens
    ids = pipeline.tokenizer(text, add_special_tokens=False).input_ids[:num_tokens]
    return pipeline.tokenizer.decode(ids)


def test_the_limit_is_the_encoders_own(pipeline, told):
    whole, cut = words_of(pipeline, 1000), words_of(pipeline, 1001)
    assert told(whole) is None
    assert "1 prompt(s)" in told(whole, cut) and "1,001 tokens of 1,000 in 'a red red" in told(whole, cut)
    many = words_of(pipeline, 1100)
    full, longer = (pipeline.encode([text]).text[0] for text in (many, many + "!"))
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


def test_many_are_counted_and_a_few_are_named(told):
    said = told(*(f"{number} " + "red " * 1200 for number in range(20)), "0 " + "red " * 1200)
    assert said.startswith("20 prompt(s)") and said.endswith("; ...") and said.count(" tokens of ") == 5


def test_training_says_it_when_it_begins(make_training, tmp_path, capsys):
    csv = tmp_path / "long.csv"
    csv.write_text("prompt\na red circle\nblue " + "square " * 1200 + "\n")
    make_training(train_video_csv=csv)
    assert "WARNING: 1 prompt(s) are longer than the model reads" in capsys.readouterr().err
