"""Sequence parallelism (Ulysses): tokens are split between ranks, and heads while a block attends.

Outside attention a rank has `S / P` of the video's S tokens (padded to a multiple of P at the end) and all N heads;
inside it has all tokens and `N / P` heads. Tokens of the condition are few: every rank has all of them, and in
attention its own heads.

Every rank of the group computes the same loss from the same whole output. Then a gradient summed over the group is
the true one: `gather_tokens` hands each rank its own tokens' part of the loss's gradient, and `gather_heads_of_all`
sums the parts of it that the ranks' heads have found.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional

from hyvideo.distributed.mesh import largest_share


def shard_tokens(tokens: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's `[B, ceil(S / P), D]` of `tokens` `[B, S, D]`; zeros where S does not divide by P."""
    num_local = largest_share(tokens.shape[1], group.size())
    start = group.rank() * num_local
    own = tokens[:, start : start + num_local]
    return F.pad(own, (0, 0, 0, num_local - own.shape[1]))


def gather_tokens(tokens: Tensor, num_tokens: int, group: ProcessGroup) -> Tensor:
    """Join the ranks' `[B, S / P, ...]` to `[B, S, ...]`, S = `num_tokens`; the inverse of `shard_tokens`.

    Its gradient is this rank's part of the output's gradient, which all ranks have whole.
    """
    return _GatherTokens.apply(tokens, group)[:, :num_tokens]


class _GatherTokens(torch.autograd.Function):
    """All-gather of dim 1 whose backward pass keeps this rank's part, without communication."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tokens: Tensor, group: ProcessGroup) -> Tensor:
        """Join the ranks' `[B, S / P, ...]` to `[B, S, ...]`."""
        ctx.rank, ctx.num_local = group.rank(), tokens.shape[1]
        parts = functional.all_gather_single(tokens.contiguous(), 0, group)
        return rearrange(parts, "(p b) s ... -> b (p s) ...", p=group.size())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        """Return this rank's part of the gradient `[B, S, ...]`."""
        return gradient.narrow(1, ctx.rank * ctx.num_local, ctx.num_local), None


def tokens_to_heads(tensors: Tensor, num_tokens: int, group: ProcessGroup) -> Tensor:
    """Exchange own tokens with all heads for all tokens with own heads.

    Args:
        tensors: `[T, B, S / P, N, D]`: T tensors (query, key, value) sent together.
        num_tokens: S; what follows is padding and is cut off.
        group: P ranks; P divides N.

    Returns:
        `[T, B, S, N / P, D]`.
    """
    by_rank = rearrange(tensors, "t b s (p n) d -> p t b s n d", p=group.size()).contiguous()
    received = functional.all_to_all_single_autograd(by_rank, None, None, group)
    return rearrange(received, "p t b s n d -> t b (p s) n d")[:, :, :num_tokens]


def heads_to_tokens(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange all tokens with own heads `[B, S, N / P, D]` for own tokens with all heads `[B, ceil(S / P), N, D]`."""
    num_ranks = group.size()
    padded = F.pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % num_ranks))
    by_rank = rearrange(padded, "b (p s) n d -> p b s n d", p=num_ranks).contiguous()
    received = functional.all_to_all_single_autograd(by_rank, None, None, group)
    return rearrange(received, "p b s n d -> b s (p n) d")


def own_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's `[B, S, N / P, D]` of a tensor `[B, S, N, D]` that all ranks have."""
    return tensor.chunk(group.size(), dim=2)[group.rank()]


def gather_heads_of_all(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Join the ranks' heads `[B, S, N / P, D]` to `[B, S, N, D]`; the inverse of `own_heads`.

    Its gradient is the sum over ranks of the gradients of the own heads: what follows is computed by all ranks, but
    each finds only the part of the gradient that passes through its own heads and tokens.
    """
    parts = functional.all_gather_single_autograd(tensor.contiguous(), 0, group)
    return rearrange(parts, "(p b) s n d -> b s (p n) d", p=group.size())
