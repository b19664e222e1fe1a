"""What a finished checkpoint holds: size and hash of every file, dtype and shape of every tensor."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from torch.distributed.checkpoint.metadata import Metadata

from hyvideo.config.outside import read_file
from hyvideo.data.files import write_synced
from hyvideo.distributed.collectives import all_or_none, gather

MANIFEST = "manifest.json"


class FileRecord(BaseModel):
    """Size in bytes and SHA-256 of a file."""

    model_config = ConfigDict(strict=True, extra="forbid")
    size: NonNegativeInt
    sha256: str


class TensorRecord(BaseModel):
    """Name of a tensor's dtype, and its shape."""

    model_config = ConfigDict(strict=True, extra="forbid")
    dtype: str
    shape: Annotated[list[NonNegativeInt], Field(max_length=64)]


class Manifest(BaseModel):
    """Files by their path in the checkpoint, and tensors by `group.name`."""

    model_config = ConfigDict(strict=True, extra="forbid")
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]


def tensor_records(metadata: Metadata) -> dict[str, TensorRecord]:
    """Return the tensors that PyTorch says it has written, or has found."""
    return {
        name: TensorRecord(dtype=str(stored.properties.dtype).removeprefix("torch."), shape=list(stored.size))
        for name, stored in metadata.state_dict_metadata.items()
    }


def hash_files(folder: Path, *, sync: bool = False) -> dict[str, FileRecord]:
    """Return a record of every file in `folder` by its relative path; every rank reads a part of them.

    Args:
        folder: a checkpoint; its manifest is left out.
        sync: wait until the disk has the files, because PyTorch's writer does not flush before its own fsync.

    Raises:
        OSError: a file cannot be read, on any rank; all raise it, or a `ValueError` that names the rank.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with all_or_none():
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
        own = {str(path.relative_to(folder)): _record(path, sync) for path in files[rank::world_size]}
    return {name: record for part in gather(own) for name, record in part.items()}


def write_manifest(folder: Path, files: Mapping[str, FileRecord], tensors: Mapping[str, TensorRecord]) -> None:
    """Write the manifest to `folder`, on disk before anything else happens."""
    manifest = Manifest(files=dict(sorted(files.items())), tensors=dict(tensors))
    write_synced(folder / MANIFEST, manifest.model_dump_json(indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a finished checkpoint, whose files are there and have the sizes it says.

    Raises:
        ValueError: it cannot be read, names a file outside, or a file is missing or has another size.
    """
    try:
        manifest = Manifest.model_validate_json(read_file(folder / MANIFEST))
        for name in manifest.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name!r} lies outside the checkpoint")
    except (OSError, ValueError) as error:
        said = f"{error.error_count()} faults" if isinstance(error, ValidationError) else error
        raise ValueError(f"'{folder}' is not a finished checkpoint: its {MANIFEST} cannot be read ({said}).") from error
    for name, record in manifest.files.items():
        size = _size_of(folder / name)
        if size != record.size:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(_damaged(folder, name, f"{found}, expected {record.size} bytes"))
    return manifest


def verify_files(folder: Path) -> None:
    """Make sure that a finished checkpoint has exactly the files of its manifest, unchanged; all ranks call it.

    Raises:
        ValueError: a file is missing, surplus or differs, on any rank's part; all raise it, and it names the file.
    """
    with all_or_none():
        expected = read_manifest(folder).files
    try:
        received = hash_files(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"'{folder}' cannot be read ({error}). Pass another checkpoint, or check the disk.") from error
    if surplus := sorted(received.keys() - expected.keys()):
        raise ValueError(_damaged(folder, surplus[0], f"is not in its {MANIFEST}; move it away if you put it there"))
    for name, record in expected.items():
        if name not in received or received[name].sha256 != record.sha256:
            raise ValueError(_damaged(folder, name, "has other content than when it was written"))


def _size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None if there is no such file, or there can be none of that name."""
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):
        return None


def _damaged(folder: Path, name: str, what: str) -> str:
    return f"'{folder}' is damaged: {name} {what}. Pass an older checkpoint with --resume_from_checkpoint PATH."


def _record(path: Path, sync: bool) -> FileRecord:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return FileRecord(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
