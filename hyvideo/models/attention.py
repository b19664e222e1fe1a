"""Trimmed attention for the HunyuanVideo-1.5 transformer: no work on padded text, no dense mask.

The stock transformer carries up to 1,985 condition tokens (729 vision, 256 glyph, 1,000 text) through every block and
hides the padding behind a dense (B, 1, S, S) mask. Valid tokens are put first before block 0, so the padding can be
cut there once. Three cuts, all exact:

1. before the transformer: each condition to its longest valid length (all-zero vision tokens to none);
2. before every block: the joined condition to the longest valid length of the batch;
3. in attention: no mask when all rows have one length, else a (B, 1, 1, S) key mask.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

Keywords = dict[str, Any]
_FORWARD_NAMES = tuple(inspect.signature(HunyuanVideo15Transformer3DModel.forward).parameters)[1:]


class TrimmedAttnProcessor:
    """Joint attention of video and condition tokens (one per transformer block).

    Called by diffusers' `Attention` with video tokens `[B, S_video, D]`, condition tokens `[B, S_text, D]`, a key mask
    `[B, S_text]` (True = attend) or None, and rotary tables for the video tokens. Returns both streams, same shapes.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend over `[video, condition]` with scaled dot-product attention."""
        num_video = hidden_states.shape[1]
        video = _project(attn, hidden_states, attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k)
        text = _project(
            attn,
            encoder_hidden_states,
            attn.add_q_proj,
            attn.add_k_proj,
            attn.add_v_proj,
            attn.norm_added_q,
            attn.norm_added_k,
        )
        query, key, value = video
        if image_rotary_emb is not None:
            query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
            key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        joined = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip((query, key, value), text, strict=True))
        mask = None
        if attention_mask is not None:
            mask = F.pad(attention_mask, (num_video, 0), value=True)[:, None, None, :]
        out = F.scaled_dot_product_attention(*joined, attn_mask=mask)
        out = out.transpose(1, 2).flatten(2, 3)
        video_out = attn.to_out[1](attn.to_out[0](out[:, :num_video]))
        return video_out, attn.to_add_out(out[:, num_video:])


def _project(
    attn: Attention,
    hidden: Tensor,
    to_query: nn.Module,
    to_key: nn.Module,
    to_value: nn.Module,
    norm_query: nn.Module,
    norm_key: nn.Module,
) -> tuple[Tensor, Tensor, Tensor]:
    """Project one stream `[B, S, D]` to normalised query, key and value `[B, S, N, D / N]`."""
    heads = (attn.heads, -1)
    return (
        norm_query(to_query(hidden).unflatten(2, heads)),
        norm_key(to_key(hidden).unflatten(2, heads)),
        to_value(hidden).unflatten(2, heads),
    )


class _ConditionTrim:
    """The three cuts as forward pre-hooks.

    What block 0 learns of a mask (one device synchronisation) is kept for the other blocks and for recomputation under
    activation checkpointing, as long as that mask lives.
    """

    def __init__(self) -> None:
        self._trimmed = WeakTensorKeyDictionary()  # mask [B, S] -> (longest valid length, trimmed mask or None)

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
        """Cut the joined condition (a no-op after block 0) and drop a mask that hides nothing."""
        hidden, text, temb, mask, rotary = args
        if mask not in self._trimmed:
            length = int(mask.sum(1).max())
            trimmed = mask[:, :length]
            self._trimmed[mask] = (length, None if bool(trimmed.all()) else trimmed)
        length, trimmed = self._trimmed[mask]
        return hidden, text[:, :length], temb, trimmed, rotary


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
        sp_group: a sequence-parallel process group; only None (one rank) is implemented so far.

    Returns:
        The same transformer.

    Raises:
        ValueError: the attention was installed before, or a sequence-parallel group is given.
    """
    if sp_group is not None:
        raise ValueError("install_attention: sequence parallel is not available yet; expected sp_group=None.")
    if any(isinstance(block.attn.processor, TrimmedAttnProcessor) for block in transformer.transformer_blocks):
        raise ValueError("install_attention: this transformer already has the trimmed attention; install it once.")
    trim = _ConditionTrim()
    transformer.register_forward_pre_hook(trim.before_transformer, with_kwargs=True)
    transformer.context_embedder.register_forward_pre_hook(trim.before_refiner)
    for block in transformer.transformer_blocks:
        block.attn.set_processor(TrimmedAttnProcessor())
        block.register_forward_pre_hook(trim.before_block)
    return transformer
