"""A step of the transformer with trimmed attention against the stock one of diffusers: time, memory, equality.

Example: `python -m benchmarks.attention`
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

from benchmarks.paired import Result, compare, device, peak_bytes, print_results
from hyvideo.models.attention import attend_jointly, install_attention, runs_of

VIDEO_SHAPE = (10, 20, 20)
"""Latent frames, height and width: 4000 tokens."""

TEXT_TOKENS, GLYPH_TOKENS, VISION_TOKENS = 1000, 256, 729
"""What the stock pipeline pads conditions to: 1985 tokens."""

VALID_TOKENS = (80, 200, 1000)


def build_transformer(
    *, num_heads: int = 4, head_dim: int = 32, num_layers: int = 2, seed: int = 0
) -> HunyuanVideo15Transformer3DModel:
    """Make a random text-to-video transformer on the benchmark's device, in bf16 on a GPU."""
    torch.manual_seed(seed)
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=num_heads,
        attention_head_dim=head_dim,
        num_layers=num_layers,
        num_refiner_layers=1,
        text_embed_dim=32,
        text_embed_2_dim=16,
        image_embed_dim=16,
        rope_axes_dim=(head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8),
        task_type="t2v",
    )
    return transformer.eval().to(device(), torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def build_inputs(transformer: HunyuanVideo15Transformer3DModel, valid: tuple[int, ...]) -> dict[str, Any]:
    """Make arguments as the stock pipeline does, one row per number of valid text tokens."""
    generator = torch.Generator().manual_seed(0)
    config, batch = transformer.config, len(valid)

    def normal(*shape: int) -> Tensor:
        """Return noise of the network's dtype."""
        return torch.randn(*shape, generator=generator).to(transformer.device, transformer.dtype)

    mask = (torch.arange(TEXT_TOKENS) < torch.tensor(valid)[:, None]).to(transformer.device, transformer.dtype)
    return {
        "hidden_states": normal(batch, config.in_channels, *VIDEO_SHAPE),
        "timestep": torch.full((batch,), 500.0, device=transformer.device),
        "encoder_hidden_states": normal(batch, TEXT_TOKENS, config.text_embed_dim),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": normal(batch, GLYPH_TOKENS, config.text_embed_2_dim),
        "encoder_attention_mask_2": torch.zeros_like(mask[:, :GLYPH_TOKENS]),
        "image_embeds": torch.zeros_like(normal(batch, VISION_TOKENS, config.image_embed_dim)),
        "return_dict": False,
    }


def forward_pass(transformer: torch.nn.Module, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    """Return a forward pass without gradient."""

    def run() -> Tensor:
        """Return the output."""
        with torch.no_grad():
            return transformer(**inputs)[0]

    return run


def training_pass(transformer: torch.nn.Module, inputs: dict[str, Any]) -> Callable[[], None]:
    """Return a forward and backward pass."""

    def run() -> None:
        """Leave no gradients behind."""
        transformer(**inputs)[0].float().square().mean().backward()
        transformer.zero_grad(set_to_none=True)

    return run


def measure() -> list[Result]:
    """Compare with the stock attention by valid tokens, and rows of unlike lengths with a key mask."""
    stock = build_transformer()
    trimmed = install_attention(copy.deepcopy(stock))
    results = []
    for valid in VALID_TOKENS:
        inputs = build_inputs(stock, (valid,))
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
    runs = runs_of(lengths, device())
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    video, text = (
        [torch.randn(2, count, *heads, device=device(), dtype=dtype, requires_grad=True) for _ in range(3)]
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
        attend_jointly(video, text, runs)[0].float().square().mean().backward()

    return [compare("attention/guidance", "one call with a key mask / each row to its own length", with_mask, by_row)]


if __name__ == "__main__":
    print_results(measure())
