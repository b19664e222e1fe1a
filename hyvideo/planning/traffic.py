"""Bytes that one rank sends in a pass, by formula: sharded weights, gradients of copies, and a video's tokens.

A ring is assumed: all-gather and reduce-scatter of m bytes over n ranks send `m (n - 1) / n` from each, all-reduce
twice that, all-to-all of m bytes `m (n - 1) / n`.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from torch import nn

from hyvideo.distributed.layout import largest_share


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of a transformer's weights, as sharding treats them.

    Attributes:
        blocks: weights in transformer blocks.
        around: all others.
        trained: of all those that are trained.
        trained_matrices: of `trained` those with two or more dimensions, which Muon takes.
    """

    blocks: int
    around: int
    trained: int
    trained_matrices: int

    @property
    def total(self) -> int:
        """All weights."""
        return self.blocks + self.around


def count_parameters(transformer: nn.Module) -> ParameterCounts:
    """Count the weights of a prepared policy (`hyvideo.models.parallelize.prepare_policy`)."""
    rows = [
        (name.startswith("transformer_blocks."), parameter.requires_grad, parameter.ndim >= 2, parameter.numel())
        for name, parameter in transformer.named_parameters()
    ]
    return ParameterCounts(
        blocks=sum(count for inside, _, _, count in rows if inside),
        around=sum(count for inside, _, _, count in rows if not inside),
        trained=sum(count for _, trained, _, count in rows if trained),
        trained_matrices=sum(count for _, trained, matrix, count in rows if trained and matrix),
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends.

    Attributes:
        weights: gathering sharded weights and reducing their gradients, over one copy of the model.
        copies: reducing gradients between copies of the model.
        tokens: a video's tokens to heads and back, over the ranks that share it.
        condition: heads of the condition tokens, and the output, over these ranks.
    """

    weights: int = 0
    copies: int = 0
    tokens: int = 0
    condition: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: int) -> "Traffic":
        """Return the bytes of `count` such passes."""
        return Traffic(*(count * part for part in astuple(self)))


def weight_traffic(
    parameters: ParameterCounts,
    *,
    num_shards: int,
    dp_replicate: int = 1,
    block_bytes: int = 4,
    around_bytes: int = 4,
    training: bool,
    resharded: bool = True,
) -> Traffic:
    """Return what sharded weights cost in one forward pass, or with `training` one forward and backward pass.

    They are gathered for each pass and freed after it, at `block_bytes` of each weight in a block and `around_bytes` of
    each other one; gradients are reduced in float32 once, between `dp_replicate` copies too. Weights that are not
    `resharded` after the forward pass are still there for the backward pass.
    """
    gathered = parameters.blocks * block_bytes + parameters.around * around_bytes
    reduced = 4 * parameters.trained if training else 0
    sent = ((2 if training and resharded else 1) * gathered + reduced) * (num_shards - 1) // num_shards
    return Traffic(weights=sent, copies=2 * (reduced // num_shards) * (dp_replicate - 1) // dp_replicate)


def token_traffic(
    config: Mapping[str, Any],
    *,
    num_video: int,
    num_condition: int,
    rows: int = 1,
    sp_size: int,
    token_bytes: int = 4,
    training: bool,
    recompute: bool = False,
) -> Traffic:
    """Return what sharing a video's tokens costs in one forward pass, or one forward and backward pass.

    Per block, query, key, value and output change between tokens and heads, and the condition's heads are gathered; the
    backward pass does the same with the gradients, but for the last block's condition; the output's tokens are gathered
    once. `sp_size` ranks share a row, and an activation has `token_bytes`.
    """
    width = config["num_attention_heads"] * config["attention_head_dim"]
    passes = 1 + (1 + recompute if training else 0)
    own = largest_share(num_video, sp_size)
    per_block = 4 * token_bytes * own * width * (sp_size - 1) // sp_size
    condition = token_bytes * num_condition * width * (sp_size - 1) // sp_size
    patch = config["patch_size_t"] * config["patch_size"] ** 2
    output = token_bytes * own * patch * config["out_channels"] * (sp_size - 1)
    layers = config["num_layers"]
    gathered = layers * passes - training  # nothing uses the last block's condition, so no gradient of it returns
    return Traffic(tokens=rows * layers * per_block * passes, condition=rows * (gathered * condition + output))
