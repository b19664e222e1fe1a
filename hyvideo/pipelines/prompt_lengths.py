"""Prompts that are longer than the encoders read: the policy never sees their end, while rewards score all of it."""

from collections.abc import Sequence

from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

from hyvideo.data.prompts import Prompt
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline

TOKENIZED = 1000
"""Prompts tokenized at once, spread over the processor's cores."""

LISTED = 5
"""Prompts that the warning names at most."""


def truncated_prompts_warning(pipeline: HunyuanVideoGRPOPipeline, prompts: Sequence[Prompt]) -> str | None:
    """Return a warning that counts and names the prompts whose end no encoder reads; None where there are none.

    Quoted texts are read as bytes, with the words that join them and a mark at their end.
    """
    texts = list(dict.fromkeys(prompt.text for prompt in prompts))
    limit, glyph_limit = pipeline.tokenizer_max_length, pipeline.tokenizer_2_max_length - 1
    long, counts = [text for text in texts if len(text.encode()) > limit], {}  # no token is less than a byte
    for start in range(0, len(long), TOKENIZED):
        part = long[start : start + TOKENIZED]
        found = pipeline.tokenizer(part, add_special_tokens=False, verbose=False).input_ids
        counts |= zip(part, map(len, found), strict=True)
    quoted = {text: len((extract_glyph_texts(text) or "").encode()) for text in texts}
    said = []
    for text in texts:
        told = [f"{counts[text]:,} tokens of {limit:,}"] if counts.get(text, 0) > limit else []
        told += [f"{quoted[text]:,} quoted bytes of {glyph_limit:,}"] if quoted[text] > glyph_limit else []
        if told:
            said.append(f"{' and '.join(told)} in {text[:60]!r}")
    if not said:
        return None
    listed = "; ".join(said[:LISTED]) + ("; ..." if len(said) > LISTED else "")
    return (
        f"{len(said)} prompt(s) are longer than the model reads. It never sees their end, but a reward may score it: "
        f"shorten them. {listed}"
    )
