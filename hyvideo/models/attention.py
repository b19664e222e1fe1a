"""Trimmed attention for the HunyuanVideo-1.5 transformer: no work on padded text, no dense mask; over 1..n ranks.

The stock transformer carries up to 1,985 condition tokens (729 vision, 256 glyph, 1,000 text) through every block and
hides the padding behind a dense (B, 1, S, S) mask. Valid tokens are put first before block 0, so the padding can be
cut there once. Three cuts, all exact:

1. before the transformer: each condition to its longest valid length (all-zero vision tokens to none);
2. before every block: the joined condition to the longest valid length of the batch;
3. in attention: rows to their own length. Consecutive rows of one length attend together, so no call has a mask,
   which flash attention cannot take: guidance joins two prompts of unlike length. Only short videos, for which a call
   costs more than its work, attend in one call with a (B, 1, 1, S) key mask.

With a sequence-parallel group a rank keeps its part of the video tokens from the patch embedding to the last projection
(`hyvideo.distributed.ulysses`); the transformer is called with the same whole arguments, and returns the same whole
output, on all ranks of the group.
"""

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from hyvideo.distributed.ulysses import (
    gather_heads_of_all,
    gather_tokens,
    heads_to_tokens,
    own_heads,
    shard_tokens,
    tokens_to_heads,
)

ROWS_FROM = 1000
"""From this many video tokens on, rows of unlike length attend separately: below, a call with a key mask is faster."""

Keywords = dict[str, Any]
_FORWARD_NAMES = tuple(inspect.signature(HunyuanVideo15Transformer3DModel.forward).parameters)[1:]


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


class TrimmedAttnProcessor:
    """Joint attention of video and condition tokens (one per transformer block).

    Called by diffusers' `Attention` with video tokens `[B, S_video, D]`, condition tokens `[B, S_text, D]`, how many of
    the latter are valid in which rows (None: all), and rotary tables for the video tokens. Returns both streams, same
    shapes; what is returned for padding is never attended to.

    Args:
        sp_group: the ranks that share the video tokens. Then S_video is this rank's padded part of them, while the
            condition tokens and the rotary tables are whole: the tables say how many tokens there really are.
    """

    def __init__(self, sp_group: ProcessGroup | None = None) -> None:
        self.sp_group = sp_group

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Sequence[EqualRows] | None,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Attend over `[video, condition]` with scaled dot-product attention; `attention_mask` has the equal rows."""
        heads = (attn.heads, -1)
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(2, heads))
        key = attn.norm_k(attn.to_k(hidden_states).unflatten(2, heads))
        value = attn.to_v(hidden_states).unflatten(2, heads)
        text = (
            attn.norm_added_q(attn.add_q_proj(encoder_hidden_states).unflatten(2, heads)),
            attn.norm_added_k(attn.add_k_proj(encoder_hidden_states).unflatten(2, heads)),
            attn.add_v_proj(encoder_hidden_states).unflatten(2, heads),
        )
        if self.sp_group is not None:
            num_video, dtype = image_rotary_emb[0].shape[0], value.dtype
            stacked = torch.stack([query.to(dtype), key.to(dtype), value])  # autocast may have left norms in float32
            query, key, value = tokens_to_heads(stacked, num_video, self.sp_group)
            text = tuple(own_heads(part, self.sp_group) for part in text)
        query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
        key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        video_out, text_out = attend_jointly((query, key, value), text, attention_mask)
        if self.sp_group is not None:
            video_out = heads_to_tokens(video_out, self.sp_group)
            text_out = gather_heads_of_all(text_out, self.sp_group)
        video_out = attn.to_out[1](attn.to_out[0](video_out.flatten(2, 3)))
        return video_out, attn.to_add_out(text_out.flatten(2, 3))


def attend_jointly(
    video: Sequence[Tensor], text: Sequence[Tensor], equal_rows: Sequence[EqualRows] | None
) -> tuple[Tensor, Tensor]:
    """Attend jointly, each row to its own valid tokens.

    Args:
        video: query, key and value `[B, S, N, D]` of the video tokens.
        text: those of the condition tokens, `[B, T, N, D]`.
        equal_rows: which of the T are valid; None: all.

    Returns:
        `[B, S, N, D]` and `[B, T, N, D]`; the latter is arbitrary where a row has padding.
    """
    num_text, num_video = text[0].shape[1], video[0].shape[1]
    if equal_rows is None or num_video < ROWS_FROM:
        out = _attend(video, text, None if equal_rows is None else _key_mask(equal_rows, num_video, num_text))
        return out[:, :num_video], out[:, num_video:]
    video_out, text_out = [], []
    for start, stop, valid in equal_rows:
        length = valid.shape[0]
        out = _attend([part[start:stop] for part in video], [part[start:stop, :length] for part in text])
        video_out.append(out[:, :num_video])
        text_out.append(F.pad(out[:, num_video:], (0, 0, 0, 0, 0, num_text - length)))
    return torch.cat(video_out), torch.cat(text_out)


def _attend(video: Sequence[Tensor], text: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
    """Join both streams of query, key and value and attend; `[B, S + T, N, D]`."""
    joined = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(video, text, strict=True))
    return F.scaled_dot_product_attention(*joined, attn_mask=mask).transpose(1, 2)


def _key_mask(equal_rows: Sequence[EqualRows], num_video: int, num_text: int) -> Tensor:
    """Return `[B, 1, 1, S + T]`, True where a key is valid."""
    rows = [
        F.pad(torch.ones_like(valid, dtype=torch.bool), (num_video, 0), value=True).expand(stop - start, -1)
        for start, stop, valid in equal_rows
    ]
    size = num_video + num_text
    return torch.cat([F.pad(part, (0, size - part.shape[1]), value=False) for part in rows])[:, None, None]


def equal_rows_of(lengths: Sequence[int], device: torch.device | None = None) -> tuple[EqualRows, ...]:
    """Group consecutive rows of equal length: `(3, 3, 5)` are rows 0 and 1 with 3 tokens and row 2 with 5."""
    equal_rows, start = [], 0
    for length, rows in groupby(lengths):
        stop = start + len(list(rows))
        equal_rows.append(EqualRows(start, stop, torch.empty(length, device=device, dtype=torch.bool)))
        start = stop
    return tuple(equal_rows)


class _ConditionTrim:
    """The three cuts as forward pre-hooks.

    What block 0 learns of a mask (one device synchronisation) is kept for the other blocks and for recomputation under
    activation checkpointing, as long as that mask lives.
    """

    def __init__(self) -> None:
        self._equal_rows = WeakTensorKeyDictionary()  # mask [B, S] -> its equal rows

    def before_transformer(self, module: nn.Module, args: tuple, kwargs: Keywords) -> tuple[tuple, Keywords]:
        """Cut every condition to the longest valid length in the batch."""
        kwargs = {**dict(zip(_FORWARD_NAMES, args, strict=False)), **kwargs}
        if not bool(kwargs["image_embeds"].any()):
            kwargs["image_embeds"] = kwargs["image_embeds"][:, :0]
        for suffix in ("", "_2"):
            mask = kwargs[f"encoder_attention_mask{suffix}"].bool()
            length = _valid_length(mask, f"encoder_attention_mask{suffix}")
            kwargs[f"encoder_attention_mask{suffix}"] = mask[:, :length]
            kwargs[f"encoder_hidden_states{suffix}"] = kwargs[f"encoder_hidden_states{suffix}"][:, :length]
        return (), kwargs

    def before_refiner(self, module: nn.Module, args: tuple) -> tuple:
        """Drop the refiner's mask when it hides nothing: it would be expanded to a dense one."""
        hidden, timestep, mask = args
        return hidden, timestep, None if bool(mask.all()) else mask

    def before_block(self, module: nn.Module, args: tuple) -> tuple:
        """Cut the joined condition (a no-op after block 0) and put its equal rows, if several, in the mask's place."""
        hidden, text, temb, mask, rotary = args
        if mask not in self._equal_rows:
            self._equal_rows[mask] = equal_rows_of(mask.sum(1).tolist(), mask.device)
        equal_rows = self._equal_rows[mask]
        longest = max(rows.valid.shape[0] for rows in equal_rows)
        return hidden, text[:, :longest], temb, equal_rows if len(equal_rows) > 1 else None, rotary


def _mask_keys_alone(module: nn.Module, args: tuple) -> tuple:
    """Take the first row of the refiner's mask `[B, 1, S, S]`, that of a valid query, for all queries.

    In the rows of padding no key is left to attend to, which kernels treat as they like (NaN, in the worst case). What
    such queries find is cut afterwards.
    """
    hidden, temb, mask = args
    return hidden, temb, None if mask is None else mask[:, :, :1]


class _TokenSplit:
    """Splits the video tokens after the patch embedding and joins them after the last projection, as forward hooks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._num_tokens = 0  # of the current forward pass

    def after_embedder(self, module: nn.Module, args: tuple, tokens: Tensor) -> Tensor:
        """Keep this rank's part of the tokens `[B, S, D]`."""
        self._num_tokens = tokens.shape[1]
        return shard_tokens(tokens, self._group)

    def after_projection(self, module: nn.Module, args: tuple, tokens: Tensor) -> Tensor:
        """Join all ranks' tokens again."""
        return gather_tokens(tokens, self._num_tokens, self._group)


def _valid_length(mask: Tensor, name: str) -> int:
    """Return the longest valid length of a right-padded mask `[B, S]`."""
    lengths = mask.sum(1)
    positions = torch.arange(mask.shape[1], device=mask.device)
    if bool((mask != (positions < lengths[:, None])).any()):
        raise ValueError(f"{name} must be right-padded (valid tokens first, then padding); received a mask with gaps.")
    return int(lengths.max()) if mask.numel() else 0


def install_attention(
    transformer: HunyuanVideo15Transformer3DModel, sp_group: ProcessGroup | None = None
) -> HunyuanVideo15Transformer3DModel:
    """Replace the stock attention of `transformer` in place by the trimmed one; the video output is unchanged.

    Args:
        transformer: the diffusers HunyuanVideo-1.5 transformer.
        sp_group: ranks that share the tokens of one video, all of which then call the transformer with the same
            arguments. The true gradient of a loss that all of them compute is the sum of theirs.

    Returns:
        The same transformer.

    Raises:
        ValueError: the attention was installed before, or the ranks do not divide the heads.
    """
    if any(isinstance(block.attn.processor, TrimmedAttnProcessor) for block in transformer.transformer_blocks):
        raise ValueError("install_attention: this transformer already has the trimmed attention; install it once.")
    num_heads = transformer.config.num_attention_heads
    if sp_group is not None and num_heads % sp_group.size():
        raise ValueError(
            f"sp_size {sp_group.size()} does not divide the {num_heads} attention heads of this transformer: set it to "
            f"one of {', '.join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)}."
        )
    trim = _ConditionTrim()
    transformer.register_forward_pre_hook(trim.before_transformer, with_kwargs=True)
    transformer.context_embedder.register_forward_pre_hook(trim.before_refiner)
    for block in transformer.context_embedder.token_refiner.refiner_blocks:
        block.register_forward_pre_hook(_mask_keys_alone)
    for block in transformer.transformer_blocks:
        block.attn.set_processor(TrimmedAttnProcessor(sp_group))
        block.register_forward_pre_hook(trim.before_block)
    if sp_group is not None:
        split = _TokenSplit(sp_group)
        transformer.x_embedder.register_forward_hook(split.after_embedder)
        transformer.proj_out.register_forward_hook(split.after_projection)
    return transformer
