"""The forward pass of HunyuanVideo-1.5's transformer, over the modules of diffusers: no padding, no mask, no hooks.

The stock forward carries up to 1,985 condition tokens (729 vision, 256 glyph, 1,000 text) through every block and hides
the padding behind a dense mask. Here every row of a batch comes with its own tokens alone. Their numbers are known on
the host, so that nothing is read back from the device. Only between the blocks' attentions are the condition tokens of
a batch padded to those of its longest row.

`transformer_flops` counts the floating-point operations of a pass: only the matrix products, a multiply-add being two.
Norms, activations and modulation are left out, as is usual: they are far below one percent of the operations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.utils import apply_lora_scale
from einops import rearrange
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hyvideo.distributed.mesh import largest_share
from hyvideo.distributed.ulysses import gather_tokens, shard_tokens

TEXT, GLYPH, IMAGE = range(3)
"""Rows of the transformer's table of condition kinds."""


class EqualRows(NamedTuple):
    """Consecutive rows of a batch with the same number of valid condition tokens.

    Attributes:
        start: first row.
        stop: row after the last.
        valid: `[T']`, any tensor with one element per valid token: `torch.compile` keeps sizes open, but would
            compile anew for every other number.
    """

    start: int
    stop: int
    valid: Tensor


@apply_lora_scale("attention_kwargs")
def forward(
    self: HunyuanVideo15Transformer3DModel,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor | Sequence[Tensor],
    encoder_attention_mask: Tensor | None = None,
    timestep_r: Tensor | None = None,
    encoder_hidden_states_2: Tensor | Sequence[Tensor] = (),
    encoder_attention_mask_2: Tensor | None = None,
    image_embeds: Tensor | None = None,
    attention_kwargs: dict | None = None,
    return_dict: bool = True,
) -> Transformer2DModelOutput | tuple[Tensor]:
    """Return the velocity `[B, C, F', H', W']`, called as the stock forward or with unpadded rows of condition tokens.

    Latents are `[B, C_in, F', H', W']`, and `timestep` and `timestep_r`, where the step leads to (step-distilled
    models), are `[B]`. The text and the quoted texts are B tensors `[S_b, D]` each; or padded `[B, S, D]` with a mask
    `[B, S]`, as the stock forward takes them. Then the mask is read back from the device, which waits for it.
    `image_embeds` are `[B, S_v, D_v]` states of the first frames; None, or all zero as in the stock forward, for none.
    `attention_kwargs` has the `scale` of a LoRA adapter.
    """
    if isinstance(encoder_hidden_states, Tensor):
        encoder_hidden_states = _rows_of(encoder_hidden_states, encoder_attention_mask, "encoder_attention_mask")
        encoder_hidden_states_2 = _rows_of(
            encoder_hidden_states_2, encoder_attention_mask_2, "encoder_attention_mask_2"
        )
        if image_embeds is not None and not bool(image_embeds.any()):
            image_embeds = None
    processor = self.transformer_blocks[0].attn.processor
    group, row_group, num_rows = processor.sp_group, processor.row_group, hidden_states.shape[0]
    if row_group is not None:
        if num_rows % row_group.size():  # else rows would be left out
            raise ValueError(f"{row_group.size()} ranks share the rows of a batch, so it cannot have {num_rows}")
        share = num_rows // row_group.size()
        own = slice(row_group.rank() * share, (row_group.rank() + 1) * share)
        hidden_states, timestep = hidden_states[own], timestep[own]
        timestep_r = None if timestep_r is None else timestep_r[own]
        encoder_hidden_states, encoder_hidden_states_2 = encoder_hidden_states[own], encoder_hidden_states_2[own]
        image_embeds = None if image_embeds is None else image_embeds[own]
    rotary = self.rope(hidden_states)
    embedded = self.time_embed(timestep, timestep_r=timestep_r)
    condition, equal_rows = _condition(self, timestep, encoder_hidden_states, encoder_hidden_states_2, image_embeds)
    tokens = self.x_embedder(hidden_states)
    if group is not None:
        num_tokens, tokens = tokens.shape[1], shard_tokens(tokens, group)
    for block in self.transformer_blocks:
        tokens, condition = block(tokens, condition, embedded, equal_rows, rotary)
    tokens = self.proj_out(self.norm_out(tokens, embedded))
    if group is not None:
        tokens = gather_tokens(tokens, num_tokens, group)
    frames, height, width = hidden_states.shape[2:]
    in_time, in_space = self.config.patch_size_t, self.config.patch_size
    velocity = rearrange(
        tokens,
        "b (f h w) (c pf ph pw) -> b c (f pf) (h ph) (w pw)",
        f=frames // in_time,
        h=height // in_space,
        w=width // in_space,
        pf=in_time,
        ph=in_space,
        pw=in_space,
    )
    if row_group is not None:
        velocity = gather_tokens(velocity[None], num_rows, row_group)[0]
    return Transformer2DModelOutput(sample=velocity) if return_dict else (velocity,)


def _condition(
    self: HunyuanVideo15Transformer3DModel,
    timestep: Tensor,
    text: Sequence[Tensor],
    glyph: Sequence[Tensor],
    image: Tensor | None,
) -> tuple[Tensor, tuple[EqualRows, ...] | None]:
    """Embed the condition: `[B, T, D]`, each row its image, quoted and text tokens, then zeros; and the equal rows.

    Rows of one text length pass the refiner together. The equal rows are None where all are.
    """

    def with_kind(tokens: Tensor, kind: int) -> Tensor:
        """Mark tokens `[B, T, D]` as TEXT, GLYPH or IMAGE."""
        return tokens + self.cond_type_embed(torch.full(tokens.shape[:-1], kind, device=tokens.device))

    refined, order = {}, sorted(range(len(text)), key=lambda row: len(text[row]))
    for _, rows in groupby(order, key=lambda row: len(text[row])):
        rows = list(rows)
        together = [torch.stack([part[row] for row in rows]) for part in (text, timestep)]
        refined |= zip(rows, with_kind(self.context_embedder(*together), TEXT), strict=True)
    quoted = with_kind(self.context_embedder_2(torch.cat(list(glyph))), GLYPH).split([len(row) for row in glyph])
    if image is None:
        image = timestep.new_zeros(len(text), 0, self.config.image_embed_dim)
    seen = with_kind(self.image_embedder(image), IMAGE)
    joined = [torch.cat([seen[row], quoted[row], refined[row]]) for row in range(len(text))]
    equal_rows = equal_rows_of([len(row) for row in joined], timestep.device)
    return pad_sequence(joined, batch_first=True), equal_rows if len(equal_rows) > 1 else None


def equal_rows_of(lengths: Sequence[int], device: torch.device | None = None) -> tuple[EqualRows, ...]:
    """Group consecutive rows of equal length: `(3, 3, 5)` are rows 0 and 1 with 3 tokens and row 2 with 5."""
    equal_rows, start = [], 0
    for length, rows in groupby(lengths):
        stop = start + len(list(rows))
        equal_rows.append(EqualRows(start, stop, torch.empty(length, device=device, dtype=torch.bool)))
        start = stop
    return tuple(equal_rows)


def _rows_of(padded: Tensor, mask: Tensor, name: str) -> list[Tensor]:
    """Cut `[B, S, D]` to the valid tokens of each row."""
    mask = mask.bool()
    lengths = mask.sum(1)
    if bool((mask != (torch.arange(mask.shape[1], device=mask.device) < lengths[:, None])).any()):
        raise ValueError(f"{name} must be right-padded (valid tokens first, then padding); received a mask with gaps.")
    return [row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)]


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
