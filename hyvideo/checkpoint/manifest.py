"""Size and hash of every file of a finished checkpoint, by which damage is found before anything is read."""

import hashlib
import json
from pathlib import Path
from typing import TypedDict

import torch.distributed as dist
from pydantic_core import from_json

from hyvideo.config.outside import read_file
from hyvideo.data.files import write_synced
from hyvideo.distributed.collectives import all_or_none, gather

MANIFEST = "manifest.json"


class FileRecord(TypedDict):
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


def hash_files(folder: Path) -> dict[str, FileRecord]:
    """Return a record of every file in `folder` by its relative path; every rank reads a part of them.

    Raises:
        OSError: a file cannot be read, on any rank; all raise it, or a `ValueError` that names the rank.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with all_or_none():
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
        own = {str(path.relative_to(folder)): _record(path) for path in files[rank::world_size]}
    return {name: record for part in gather(own) for name, record in part.items()}


def write_manifest(folder: Path, records: dict[str, FileRecord]) -> None:
    """Write what `hash_files` returned to `folder`, on disk before anything else happens."""
    write_synced(folder / MANIFEST, json.dumps(records, indent=1, sort_keys=True).encode())


def verify_files(folder: Path) -> None:
    """Make sure that a finished checkpoint has exactly the files of its manifest, unchanged; all ranks call it.

    Raises:
        ValueError: a file is missing, surplus or differs, on any rank's part; all raise it, and it names the file.
    """
    with all_or_none():
        try:
            expected = _checked(from_json(read_file(folder / MANIFEST)))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"'{folder}' is not a finished checkpoint: its {MANIFEST} cannot be read ({error})."
            ) from error
        sizes = {name: _size_of(folder / name) for name in expected}
        for name, record in expected.items():
            if sizes[name] != record["size"]:
                found = "is missing" if sizes[name] is None else f"has {sizes[name]} bytes"
                raise ValueError(_damaged(folder, name, f"{found}, expected {record['size']} bytes"))
    try:
        received = hash_files(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"'{folder}' cannot be read ({error}). Pass another checkpoint, or check the disk.") from error
    if surplus := sorted(received.keys() - expected.keys()):
        raise ValueError(_damaged(folder, surplus[0], f"is not in its {MANIFEST}; move it away if you put it there"))
    for name, record in expected.items():
        if received.get(name, {}).get("sha256") != record["sha256"]:
            raise ValueError(_damaged(folder, name, "has other content than when it was written"))


def _checked(records: object) -> dict[str, FileRecord]:
    """Return `records` if they have the form that `write_manifest` writes.

    Raises:
        ValueError: they have not, or a file lies outside the folder.
    """
    whole = isinstance(records, dict) and all(
        isinstance(record, dict) and type(record.get("size")) is int and isinstance(record.get("sha256"), str)
        for record in records.values()
    )
    if not whole:
        raise ValueError("expected size and sha256 of every file")
    for name in records:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name!r} lies outside the checkpoint")
    return records


def _size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None if there is no such file, or there can be none of that name."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _damaged(folder: Path, name: str, what: str) -> str:
    return f"'{folder}' is damaged: {name} {what}. Pass an older checkpoint with --resume_from_checkpoint PATH."


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
