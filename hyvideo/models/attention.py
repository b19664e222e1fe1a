"""Joint attention of video and condition tokens, each row to its own valid tokens; over 1..n ranks.

Flash attention takes no mask, so rows attend together only if they have the same length and follow one another. A batch
has rows of several lengths if it has several prompts, or one and the negative prompt of guidance.

With a sequence-parallel group a rank keeps its part of the video tokens from the patch embedding to the last projection
(`hyvideo.distributed.ulysses`); the transformer is called with the same whole arguments, and returns the same whole
output, on all ranks of the group.
"""

from collections.abc import Sequence
from types import MethodType

import torch
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel

from hyvideo.distributed.ulysses import gather_heads_of_all, heads_to_tokens, own_heads, tokens_to_heads
from hyvideo.models.transformer import EqualRows, forward

KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""In order of preference, whatever PyTorch prefers: on an H200 the flash kernel takes 1.7 times as long as cuDNN's."""


class TrimmedAttnProcessor:
    """Joint attention of video and condition tokens (one per transformer block).

    Called by diffusers' `Attention` with video tokens `[B, S_video, D]`, condition tokens `[B, S_text, D]`, how many of
    the latter are valid in which rows (None: all), and rotary tables for the video tokens. Returns both streams, same
    shapes; what is returned for padding is never attended to.

    With an `sp_group` S_video is this rank's padded part of the video tokens, while the condition tokens and the rotary
    tables are whole: the tables say how many tokens there really are. A `row_group` shares rows before the first block.
    """

    _attention_backend: AttentionBackendName | None = None  # `set_attention_backend` of diffusers sets it, to sample

    def __init__(self, sp_group: ProcessGroup | None = None, row_group: ProcessGroup | None = None) -> None:
        self.sp_group = sp_group
        self.row_group = row_group

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
        video_out, text_out = attend_jointly((query, key, value), text, attention_mask, self._attention_backend)
        if self.sp_group is not None:
            video_out = heads_to_tokens(video_out, self.sp_group)
            text_out = gather_heads_of_all(text_out, self.sp_group)
        video_out = attn.to_out[1](attn.to_out[0](video_out.flatten(2, 3)))
        return video_out, attn.to_add_out(text_out.flatten(2, 3))


def attend_jointly(
    video: Sequence[Tensor],
    text: Sequence[Tensor],
    equal_rows: Sequence[EqualRows] | None,
    backend: AttentionBackendName | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend jointly, each row to its own valid tokens: `[B, S, N, D]` and `[B, T, N, D]`.

    `video` and `text` are query, key and value of the same shapes. `equal_rows` says which of the T condition tokens
    are valid (None: all); where a row has padding, its result is zero. `backend` is one of diffusers (None: the first
    of our kernels that can run).
    """
    num_text, num_video = text[0].shape[1], video[0].shape[1]
    if equal_rows is None:
        out = _attend(video, text, backend)
        return out[:, :num_video], out[:, num_video:]
    video_out, text_out = [], []
    for start, stop, valid in equal_rows:
        length = valid.shape[0]
        out = _attend([part[start:stop] for part in video], [part[start:stop, :length] for part in text], backend)
        video_out.append(out[:, :num_video])
        text_out.append(F.pad(out[:, num_video:], (0, 0, 0, 0, 0, num_text - length)))
    return torch.cat(video_out), torch.cat(text_out)


def _attend(video: Sequence[Tensor], text: Sequence[Tensor], backend: AttentionBackendName | None) -> Tensor:
    """Join both streams of query, key and value and attend; `[B, S + T, N, D]`."""
    joined = (torch.cat(pair, dim=1) for pair in zip(video, text, strict=True))
    if backend is not None:  # it takes one dtype, and autocast may have left norms in float32
        return dispatch_attention_fn(*(part.to(video[2].dtype) for part in joined), backend=backend)
    with sdpa_kernel(KERNELS, set_priority=True):
        return F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in joined)).transpose(1, 2)


def kernel_in_use(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    """Say which kernel PyTorch chooses to train with queries, keys and values of a shape `[B, S, N, D]`."""
    query = torch.empty(shape, dtype=dtype, device=device, requires_grad=True).transpose(1, 2)
    with sdpa_kernel(KERNELS, set_priority=True):
        kernel = SDPBackend(torch._fused_sdp_choice(query, query, query))
    slower = "" if kernel == KERNELS[0] else "; cuDNN's cannot run here, which on an H200 is 1.7 times as fast as flash"
    return f"attention kernel: {kernel.name.lower().removesuffix('_attention')}{slower}"


def install_attention(
    transformer: HunyuanVideo15Transformer3DModel,
    sp_group: ProcessGroup | None = None,
    row_group: ProcessGroup | None = None,
) -> HunyuanVideo15Transformer3DModel:
    """Replace the stock forward and attention of `transformer` in place; the video output is unchanged.

    The ranks of `sp_group` share the tokens of one video, and all call the transformer with the same arguments. The
    true gradient of a loss that all of them compute is the sum of theirs. The ranks of `row_group` share the rows of a
    batch, each an equal part of them, in the same way.
    """
    num_heads = transformer.config.num_attention_heads
    if sp_group is not None and num_heads % sp_group.size():
        raise ValueError(
            f"{sp_group.size()} ranks cannot share the {num_heads} attention heads of this transformer: set sp_size so "
            "that the ranks of a video (with guidance and an even sp_size half of them) divide the heads."
        )
    for block in transformer.transformer_blocks:
        block.attn.set_processor(TrimmedAttnProcessor(sp_group, row_group))
    transformer.forward = MethodType(forward, transformer)
    return transformer
