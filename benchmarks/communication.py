"""Count the bytes a rank sends per forward and backward pass, against the least that sharding and Ulysses can do with.

On any machine, with as many processes as wanted (no network is timed, bytes are counted)::

    torchrun --nproc_per_node 4 -m benchmarks.communication --sp_size 2

The least is that of the formulas by which `scripts/plan.py` plans (`hyvideo/planning/traffic.py`).
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.network import SMALL, build_inputs, build_transformer, training_pass
from hyvideo.distributed.mesh import build_mesh
from hyvideo.distributed.process_group import process_group
from hyvideo.models.attention import install_attention
from hyvideo.models.parallelize import prepare_policy, shard_weights
from hyvideo.planning.pretend_device import sent_bytes
from hyvideo.planning.traffic import count_parameters, token_traffic, weight_traffic

TEXT_TOKENS = 8
PATHS = {
    "_allgather_base_": "weights",
    "_reduce_scatter_base_": "weights",
    "allreduce_": "copies",
    "all_to_all_single": "tokens",
    "all_gather_into_tensor": "condition",
    "reduce_scatter_tensor": "condition",
}
"""Collective -> what is sent by it here."""


class SentBytes(TorchDispatchMode):
    """Adds up the bytes this rank sends in collectives, by what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        if operation.namespace in ("c10d", "_c10d_functional") and name in PATHS:
            self.sent[PATHS[name]] += sent_bytes(name, args, result)[1]
        return result


def measure(
    *, sp_size: int, dp_replicate: int = 1, frames: int = 4, num_layers: int = 2, recompute: bool = False
) -> dict[str, dict[str, int]]:
    """Return bytes counted and bytes at least needed, of each kind, for one micro-batch of one video of 4x4 patches.

    With `recompute` blocks are recomputed in the backward pass: Ulysses then sends its forward pass's bytes twice.
    """
    mesh = build_mesh(sp_size=sp_size, dp_replicate=dp_replicate)
    transformer = build_transformer(torch.float32, **SMALL | {"num_layers": num_layers}).cpu()
    install_attention(transformer, mesh.sp_group)
    prepare_policy(transformer, gradient_checkpointing=recompute)
    shards = {"num_shards": mesh.layout.num_shards, "dp_replicate": mesh.layout.dp_replicate}
    weights = weight_traffic(count_parameters(transformer), **shards, training=True)
    sizes = {"num_video": frames * 16, "num_condition": TEXT_TOKENS, "sp_size": mesh.sp_size}
    tokens = token_traffic(transformer.config, **sizes, training=True, recompute=recompute)
    shard_weights(transformer, mesh.weights)
    with SentBytes() as counter:
        training_pass(transformer, build_inputs(transformer, (frames, 4, 4), [TEXT_TOKENS]))()
    least = asdict(weights + tokens)
    return {kind: {"counted": counter.sent[kind], "least": least[kind]} for kind in least}


def main() -> None:
    """Print counted and least bytes as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"sp_size": 1, "dp_replicate": 1, "frames": 4, "num_layers": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recompute", action="store_true")
    arguments = vars(parser.parse_args())
    with process_group(timeout_seconds=60):
        bytes_sent = measure(**arguments)
        if torch.distributed.get_rank() == 0:
            print(json.dumps(bytes_sent))


if __name__ == "__main__":
    main()
