"""Random transformers, inputs for them, and passes through them, which the benchmarks share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn
from transformers.modeling_utils import local_torch_dtype

from benchmarks.paired import device

SMALL = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "text_embed_2_dim": 16,
    "image_embed_dim": 16,
    "rope_axes_dim": (8, 12, 12),
}
"""Settings of a transformer that a CPU can time."""

PADDED = (1000, 256, 729)
"""Tokens the stock pipeline pads text, glyphs and vision to: 1985 in all."""


def fast_dtype() -> torch.dtype:
    """Return bf16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def build_transformer(dtype: torch.dtype, **config: Any) -> HunyuanVideo15Transformer3DModel:
    """Make a text-to-video transformer with random weights on the benchmark's device.

    `config` replaces settings of the published network.
    """
    torch.manual_seed(0)
    with device(), local_torch_dtype(dtype):
        return HunyuanVideo15Transformer3DModel(**{"task_type": "t2v"} | config).eval()


def build_inputs(
    transformer: HunyuanVideo15Transformer3DModel, latents: Sequence[int], text: Sequence[int], *, padded: bool = False
) -> dict[str, Any]:
    """Make the network's arguments from float32 noise; every process makes the same.

    `latents` are frames, height and width, `text` the valid tokens of each row. Conditions may be padded as the stock
    pipeline does it, instead of to the longest row.
    """
    config, rows, options = transformer.config, len(text), {"device": transformer.device}
    generator = torch.Generator(transformer.device).manual_seed(0)
    num_text, num_glyph, num_vision = PADDED if padded else (max(text), 0, 0)

    def normal(*shape: int) -> Tensor:
        """Return noise of `rows` rows."""
        return torch.randn(rows, *shape, generator=generator, **options)

    return {
        "hidden_states": normal(config.in_channels, *latents),
        "timestep": torch.full((rows,), 500.0, **options),
        "encoder_hidden_states": normal(num_text, config.text_embed_dim),
        "encoder_attention_mask": torch.arange(num_text, **options) < torch.tensor(text, **options)[:, None],
        "encoder_hidden_states_2": normal(num_glyph, config.text_embed_2_dim),
        "encoder_attention_mask_2": torch.zeros(rows, num_glyph, dtype=torch.bool, **options),
        "image_embeds": torch.zeros(rows, num_vision, config.image_embed_dim, **options),
        "return_dict": False,
    }


def forward_pass(transformer: nn.Module, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    """Return a forward pass without gradient, under autocast where the weights are bf16."""
    return torch.no_grad()(partial(_output, transformer, inputs))


def training_pass(transformer: nn.Module, inputs: dict[str, Any]) -> Callable[[], None]:
    """Return a forward and backward pass, under autocast where the weights are bf16."""

    def run() -> None:
        """Leave no gradients behind."""
        _output(transformer, inputs).float().square().mean().backward()
        transformer.zero_grad(set_to_none=True)

    return run


def _output(transformer: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.autocast(transformer.device.type, torch.bfloat16, enabled=transformer.dtype == torch.bfloat16):
        return transformer(**inputs)[0]
