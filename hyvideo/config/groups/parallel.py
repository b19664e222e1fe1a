"""How ranks share the videos and the model, and how long they wait for each other."""

from dataclasses import dataclass
from typing import Literal

from hyvideo.config.setting import EVERY_PHASE, setting


@dataclass
class ParallelConfig:
    """Ranks: world size = dp_replicate x sharded data parallel x sp_size. None of these settings changes the result."""

    sp_size: int = setting(1, within="[1, inf)", decides=False, frees=EVERY_PHASE)
    """Ranks that share one video: the two rows of guidance if it is even, then the tokens. It must divide the world
    size."""

    dp_replicate: int = setting(1, within="[1, inf)", decides=False)
    """Full copies of the sharded model (HSDP). It must divide world size / sp_size."""

    enable_fsdp: bool = setting(True, decides=False, frees=EVERY_PHASE)
    """Shard weights, gradients and optimizer state. Otherwise every rank holds the whole model."""

    reshard_after_forward: bool = setting(True, decides=False, frees=EVERY_PHASE)
    """Free a block's gathered weights after each forward pass. Keeping them saves communication but takes the whole
    model's memory."""

    offload: list[Literal["anchor", "reward", "encoders", "ema", "weights"]] = setting(
        [], decides=False, frees=EVERY_PHASE
    )
    """What rests in host memory while it does not compute, which costs transfers. anchor: also the old policy of nft.
    encoders: of text and images, 14 GiB. ema: every update copies the trained weights there. weights: shards, gradients
    and optimizer state, which is slow."""

    activation_checkpointing: Literal["none", "full", "selective", "cheap", "elementwise"] = setting(
        "full", decides=False, frees=("update",)
    )
    """What of a block the backward pass computes again: nothing, all (a third more work for much less memory), all but
    attention (selective), also not the second feed-forward layer (cheap), or no matrix product (elementwise). The last
    three keep 1, 2 and 10 tensors per block."""

    enable_compile: bool = setting(False, decides=False)
    """Compile the transformer's blocks. The first steps then take minutes."""

    collective_timeout: int = setting(1800, within="[1, 1e9]", unit="seconds", decides=False)
    """The run fails when a rank keeps the others waiting for this long. After half of it in one phase a rank prints its
    threads' stacks, repeatedly."""
