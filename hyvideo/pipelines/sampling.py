"""Sampling a list of prompts, for validation, comparison and `generate.py`, and a word on those that are too long."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts
from torch import Tensor

from hyvideo.data.prompts import Prompt
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import (
    Conditioning,
    Guidance,
    HunyuanVideoGRPOPipeline,
    Rollout,
    SampleNoise,
)


def sample_prompts(
    pipeline: HunyuanVideoGRPOPipeline, prompts: Sequence[Prompt], guidance: Guidance, **how: Any
) -> Tensor:
    """Sample one video per prompt: `[N, F, H, W, 3]` uint8 on the CPU; `how` are the other arguments of `sampled`."""
    return torch.cat([rollout.videos for _, _, rollout in sampled(pipeline, prompts, guidance, **how)])


def sampled(
    pipeline: HunyuanVideoGRPOPipeline,
    prompts: Sequence[Prompt],
    guidance: Guidance,
    *,
    seed: int,
    batch_size: int,
    size: tuple[int, int],
    sde_type: str = "ode",
    eta: float = 0.0,
    **how: Any,
) -> Iterator[tuple[Conditioning, SampleNoise, Rollout]]:
    """Sample one video per prompt, with the ODE unless told otherwise; yield each batch's conditioning, noise, videos.

    A prompt with its own seed starts from the noise of that seed only; the others from that of `seed` and their index.
    The videos depend on `batch_size`, how many are denoised together, only by rounding. All prompts are encoded first,
    at one visit of encoders that rest in host memory. The pipeline's scheduler has its steps set, and `how` are the
    other arguments of `HunyuanVideoGRPOPipeline.rollout`.
    """
    how |= {"size": size, "sde_type": sde_type, "eta": eta, "only_last": True}
    encoded = pipeline.encode_prompts(prompts, size)
    pipeline.maybe_free_model_hooks()  # offloaded encoders leave the GPU: each would wait for the next one
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        noise = SampleNoise(
            seeds=[seed if prompt.seed is None else prompt.seed for prompt in batch],
            stream="sample",
            round=0,
            prompts=[prompt.noise_index for prompt in batch],
            generations=[0] * len(batch),
        )
        conditioning = encoded.rows(range(start, start + len(batch)))
        yield conditioning, noise, pipeline.rollout(conditioning, noise, guidance, **how)


def truncated_prompts_warning(pipeline: HunyuanVideoGRPOPipeline, prompts: Sequence[Prompt]) -> str | None:
    """Return a warning that counts and names the prompts whose end no encoder reads; None where there are none.

    Quoted texts are read as bytes, with the words that join them and a mark at their end.
    """
    texts = list(dict.fromkeys(prompt.text for prompt in prompts))
    limit, glyph_limit = pipeline.tokenizer_max_length, pipeline.tokenizer_2_max_length - 1
    long, counts = [text for text in texts if len(text.encode()) > limit], {}  # no token is less than a byte
    for start in range(0, len(long), 1000):  # as many at once are spread over the processor's cores
        part = long[start : start + 1000]
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
    listed = "; ".join(said[:5]) + ("; ..." if len(said) > 5 else "")
    return (
        f"{len(said)} prompt(s) are longer than the model reads. It never sees their end, but a reward may score it: "
        f"shorten them. {listed}"
    )
