"""Floating-point operations of the transformer: only the matrix products, a multiply-add being two.

Norms, activations and modulation are left out, as is usual: they are far below one percent of the operations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyvideo.distributed.mesh import largest_share

_TIMESTEP_CHANNELS = 256  # width of the sinusoidal timestep embedding
_GLYPH_HIDDEN = 2048  # width of the glyph text's projection
_REFINER_MLP_RATIO = 4  # width of the refiner's feed-forward layers relative to its own; the config does not set it


@dataclass(frozen=True)
class PassFlops:
    """Operations of one forward pass: of linear layers, and of the products with queries, keys and values."""

    linear: int
    attention: int

    @property
    def total(self) -> int:
        """All operations of the forward pass."""
        return self.linear + self.attention

    @property
    def model(self) -> int:
        """Three times the forward's: operations by which utilisation (MFU) is defined; recomputed ones do not count."""
        return 3 * self.total


def transformer_flops(
    config: Mapping[str, Any],
    *,
    num_video: int,
    num_text: int,
    num_glyph: int = 0,
    num_vision: int = 0,
    sp_size: int = 1,
) -> PassFlops:
    """Count one forward pass of one row (guidance has two per video) on one rank, with trimmed attention.

    `config` is that of `HunyuanVideo15Transformer3DModel`. The numbers are of valid tokens: of the video
    (`video_tokens`), the language model, the quoted texts and the first frame's image. `sp_size` ranks share the video
    tokens; condition tokens are on all of them.
    """
    width = config["num_attention_heads"] * config["attention_head_dim"]
    patch = config["patch_size_t"] * config["patch_size"] ** 2
    own = largest_share(num_video, sp_size)
    condition = num_text + num_glyph + num_vision
    per_token = 2 * (4 + 2 * config["mlp_ratio"]) * width**2  # query, key, value, output, two feed-forward layers
    modulation = 2 * 2 * 6 * width**2
    blocks = config["num_layers"] * ((own + condition) * per_token + modulation)
    attention = config["num_layers"] * 4 * (num_video + condition) ** 2 * width // sp_size
    embedding = 2 * num_video * patch * config["in_channels"] * width
    head = 2 * own * patch * config["out_channels"] * width + 4 * width**2
    timestep = 2 * (_TIMESTEP_CHANNELS + width) * width  # two layers, for the network and for its refiner
    times = timestep * (3 if config["use_meanflow"] else 2)
    pooled = 2 * (config["text_embed_dim"] + width) * width
    projection = 2 * num_text * config["text_embed_dim"] * width
    refined_token = 2 * (4 + 2 * _REFINER_MLP_RATIO) * width**2
    refiner = pooled + projection + config["num_refiner_layers"] * (num_text * refined_token + 4 * width**2)
    refined_attention = config["num_refiner_layers"] * 4 * num_text**2 * width
    glyph = 2 * num_glyph * _GLYPH_HIDDEN * (config["text_embed_2_dim"] + _GLYPH_HIDDEN + width)
    vision = 2 * num_vision * config["image_embed_dim"] * (config["image_embed_dim"] + width)
    linear = blocks + embedding + head + times + refiner + glyph + vision
    return PassFlops(int(linear), int(attention) + refined_attention)


def video_tokens(config: Mapping[str, Any], latent_shape: tuple[int, ...]) -> int:
    """Return the number of video tokens of latents `(..., F', H', W')`."""
    frames, height, width = latent_shape[-3:]
    return (frames // config["patch_size_t"]) * (height // config["patch_size"]) * (width // config["patch_size"])
