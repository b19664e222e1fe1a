"""Compare runs by what they leave on disk: rows of metrics and tensors of checkpoints, bit for bit."""

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hyvideo.checkpoint.train_state import latest_checkpoint, load_tensors
from tests.support.training import untimed


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    groups: dict[str, dict[str, Tensor]] = {}
    for key, entry in stored.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load_tensors(checkpoint, groups)
    return {f"{group}.{name}": tensor for group, named in groups.items() for name, tensor in named.items()}


def rows_of(run: Path) -> list[dict[str, float]]:
    """All metrics of a run folder but the times; what was not finite is None."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [untimed(row) for row in rows]


def assert_identical(received: Path, expected: Path) -> None:
    """Compare two runs' last checkpoints and their logs, bit for bit."""
    assert rows_of(received) == rows_of(expected)
    mine, theirs = (tensors_of(latest_checkpoint(run / "checkpoints")) for run in (received, expected))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
