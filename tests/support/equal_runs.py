"""Compare runs by what they leave on disk: rows of metrics and tensors of checkpoints, bit for bit."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.checkpoint.tensors import MANIFEST, Manifest, StoredTensors, hash_files, load_tensors, write_manifest
from hyvideo.checkpoint.train_state import latest_checkpoint


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    stored = StoredTensors(checkpoint)
    groups: dict[str, dict[str, Tensor]] = {}
    for key, entry in stored.metadata.state_dict_metadata.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load_tensors(stored, groups)
    return {f"{group}.{name}": tensor for group, named in groups.items() for name, tensor in named.items()}


def rows_of(run: Path) -> list[dict[str, float]]:
    """All metrics of a run folder but the times; what was not finite is None."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "perf/"))} for row in rows]


def assert_same(received: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare tensors by name, bit for bit."""
    assert received.keys() == expected.keys(), received.keys() ^ expected.keys()
    different = [name for name in expected if not torch.equal(received[name], expected[name])]
    assert not different, different


def assert_identical(received: Path, expected: Path) -> None:
    """Compare two runs' last checkpoints and their logs, bit for bit."""
    assert rows_of(received) == rows_of(expected)
    assert_same(*(tensors_of(latest_checkpoint(run / "checkpoints")) for run in (received, expected)))


def sign(checkpoint: Path) -> None:
    """Give a checkpoint whose files a test has changed a manifest with their hashes; its tensors stay as noted."""
    noted = Manifest.model_validate_json((checkpoint / MANIFEST).read_bytes())
    write_manifest(checkpoint, hash_files(checkpoint), noted.tensors)
