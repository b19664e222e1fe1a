"""A step of the transformer with trimmed attention against the stock one of diffusers: time, memory, equality.

Example: `python -m benchmarks.attention`
"""

import copy
import math

import torch
import torch.nn.functional as F

from benchmarks.network import SMALL, build_inputs, build_transformer, fast_dtype, forward_pass, training_pass
from benchmarks.paired import Result, compare, device, peak_bytes, print_results
from hyvideo.models.attention import attend_jointly, install_attention
from hyvideo.models.transformer import equal_rows_of

VIDEO_SHAPE = (10, 20, 20)
"""Latent frames, height and width: 4000 tokens."""

VALID_TOKENS = (80, 200, 1000)


def measure() -> list[Result]:
    """Compare with the stock attention by valid tokens, and rows of unlike lengths with a key mask."""
    stock = build_transformer(fast_dtype(), **SMALL)
    trimmed = install_attention(copy.deepcopy(stock))
    results = []
    for valid in VALID_TOKENS:
        inputs = build_inputs(stock, VIDEO_SHAPE, (valid,), padded=True)
        for kind, make in (("training", training_pass), ("no_grad", forward_pass)):
            ours, theirs = make(trimmed, inputs), make(stock, inputs)
            facts = {"memory_ratio": peak_bytes(ours) / peak_bytes(theirs)}
            if kind == "no_grad":
                expected, received = theirs(), ours()
                facts["relative_error"] = float((expected - received).abs().max() / expected.abs().max())
            name = f"attention/{kind}/{valid}_valid"
            results.append(compare(name, "stock / trimmed, 4000 + 1985 tokens", theirs, ours, facts=facts))
    return results + _unlike_lengths()


def _unlike_lengths() -> list[Result]:
    """Compare attention of guidance's two rows, each to its own length, with one call and a key mask."""
    lengths, num_video, heads = (200, 12), math.prod(VIDEO_SHAPE), (4, 32)
    equal_rows = equal_rows_of(lengths, device())
    video, text = (
        [torch.randn(2, count, *heads, device=device(), dtype=fast_dtype(), requires_grad=True) for _ in range(3)]
        for count in (num_video, max(lengths))
    )
    mask = torch.arange(num_video + max(lengths), device=device()) < torch.tensor(lengths, device=device())[:, None]
    mask[:, :num_video] = True

    def with_mask() -> None:
        """Attend with the key mask, and back."""
        joined = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(video, text, strict=True))
        out = F.scaled_dot_product_attention(*joined, attn_mask=mask[:, None, None]).transpose(1, 2)
        out[:, :num_video].float().square().mean().backward()

    def by_row() -> None:
        """Attend as we do, and back."""
        attend_jointly(video, text, equal_rows)[0].float().square().mean().backward()

    return [compare("attention/guidance", "one call with a key mask / each row to its own length", with_mask, by_row)]


if __name__ == "__main__":
    print_results(measure())
