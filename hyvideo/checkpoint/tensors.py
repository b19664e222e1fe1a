"""The tensors of a checkpoint: safetensors files, written and read by PyTorch's distributed checkpoints.

Its manifest says what must be there: size and hash of every file, dtype and shape of every tensor.

Every rank writes its own shards, and any number of ranks reads them. PyTorch's reader takes what files it finds for the
whole, so `StoredTensors` compares them with the manifest first. Safetensors itself refuses files whose header does not
describe their bytes. Nothing here is unpickled.
"""

import hashlib
import json
import os
import stat
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, Field, NonNegativeInt
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    Metadata,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hyvideo.config.outside import as_value_error, read_file
from hyvideo.data.files import write_synced
from hyvideo.distributed.collectives import all_or_none, as_shard_of, gather, local_shard

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # of saves by one process

MANIFEST = "manifest.json"

Tensors = dict[str, dict[str, Tensor]]
"""Group (policy, optimizer, ...) -> name -> tensor, sharded or whole."""

FILE_BYTES = 2**28
"""Most bytes of a rank's shards in one file, unless one tensor has more.

The number of files is the state's size by this, and at least the number of ranks: 8.3 billion weights with AdamW and an
average (133 GB) are some 500 files on 8 ranks, and 512 on 64. Every rank opens all of them to read their headers.
"""


def host_copies(tensors: Tensors) -> Tensors:
    """Copy this rank's shards to host memory, which stays allocated; the next call overwrites them.

    Beside a GPU it is pinned, so that the copies run at the speed of the bus, and the host waits for all of them once.
    """
    copies, block, filled = {}, 0, 0
    for group, named in tensors.items():
        for name, tensor in named.items():
            own = local_shard(tensor)
            if filled + own.nbytes > FILE_BYTES:
                block, filled = block + 1, 0
            place = _host_block(block, max(own.nbytes, FILE_BYTES))[filled : filled + own.nbytes]
            filled += -(-own.nbytes // 64) * 64  # where elements of any dtype may begin
            copy = place.view(own.dtype).view(own.shape).copy_(own, non_blocking=True)
            copies.setdefault(group, {})[name] = as_shard_of(tensor, copy)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


@cache
def _host_block(number: int, nbytes: int) -> Tensor:
    """Return a block of host memory, the same at every call: PyTorch rounds pinned memory up to a power of two."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


class TensorPlanner(DefaultSavePlanner):
    """Divides a state's tensors among the ranks; the main rank does it again only if they are others than before.

    PyTorch keeps the plans by a key and compares names and shapes, so the key says all that it does not.
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(enable_plan_caching=True)
        kinds = ((group, name, t.dtype, t.shape) for group, named in tensors.items() for name, t in named.items())
        self._cached_plans_key = (dist.get_world_size() if dist.is_initialized() else 1, *kinds)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Leave out of what every rank is sent after a save where the shards lie: the files say that."""
        plans, metadata = super().create_global_plan(all_plans)
        return plans, Metadata({name: replace(t, chunks=[]) for name, t in metadata.state_dict_metadata.items()})


class TensorWriter(HuggingFaceStorageWriter):
    """Writes and hashes a rank's shards, and on the main rank the manifest of the whole folder.

    PyTorch's own writer makes two copies of a file and holds Python's lock meanwhile, so training would stand still.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write shards that follow each other into one file; the result of each file is its record."""
        files, filled = [], FILE_BYTES
        for item in plan.items:
            size = planner.resolve_data(item).nbytes
            if not files or (filled and filled + size > FILE_BYTES):
                files.append([])
                filled = 0
            filled += size
            files[-1].append(item)
        records, shard = {}, plan.storage_data["shard_index"]
        with ThreadPoolExecutor(1) as pool:
            for number, items in enumerate(files, start=1):
                name = f"shard-{shard:05}-model-{number:05}-of-{len(files):05}.safetensors"
                offsets = {item.index.fqn: {"saved_offsets": item.tensor_data.chunk.offsets} for item in items}
                metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
                parts = {item.index.fqn: planner.resolve_data(item).detach().cpu().contiguous() for item in items}
                save_file(parts, self.folder / name, metadata)
                records[name] = pool.submit(_record, self.folder / name, sync=True)
        done = Future()
        done.set_result([WriteResult(MetadataIndex(n), r.result().size, r.result()) for n, r in records.items()])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest: of the tensors' files what the ranks found, of others what is found now."""
        files = {each.index.fqn: each.storage_data for of_rank in results for each in of_rank}
        for path in self.folder.rglob("*"):
            if path.is_file() and (name := str(path.relative_to(self.folder))) not in files:
                files[name] = _record(path, sync=True)
        write_manifest(self.folder, files, tensor_records(metadata))


class StoredTensors(HuggingFaceStorageReader):
    """The tensors in a checkpoint's folder, whose files are whole and hold all that its manifest says.

    Attributes:
        checkpoint: the folder.
        metadata: dtype, shape and parts of every tensor, by `group.name`.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint))
        self.checkpoint = checkpoint
        try:
            manifest = read_manifest(checkpoint)
            for path in checkpoint.glob("*.safetensors"):
                if path.name not in manifest.files or not stat.S_ISREG(path.lstat().st_mode):
                    raise ValueError(f"{path.name[:80]} is a link or no file, or is not in the manifest")
            self.metadata = super().read_metadata()
            found = tensor_records(self.metadata)
            differing = [n for n in {**manifest.tensors, **found} if manifest.tensors.get(n) != found.get(n)]
            differing += [n for n, stored in self.metadata.state_dict_metadata.items() if not _is_whole(stored.chunks)]
            if differing:
                raise ValueError(f"{min(differing)[:200]} is not stored as the manifest says, or not all of it")
        except Exception as error:  # a header may hold whatever PyTorch's reader stumbles over
            said = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"'{checkpoint}' is not a readable checkpoint: {said[:500].rstrip('.')}. Copy it again, whole."
            ) from error

    def read_metadata(self) -> Metadata:
        """Return what was read and compared when this was made."""
        return self.metadata


def _is_whole(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether the parts, cut along the first axis as FSDP2 does, follow each other from the first row on.

    Then they are as many rows as the tensor has, because PyTorch's reader takes its shape from the last one's end.
    """
    row, widths = 0, set()
    for chunk in sorted(chunks, key=lambda chunk: (*chunk.offsets, *chunk.sizes)):
        offsets, sizes = tuple(chunk.offsets) or (0,), tuple(chunk.sizes) or (1,)  # a number is one row
        if offsets != (row, *[0] * (len(sizes) - 1)):
            return False
        row, widths = row + sizes[0], widths | {sizes[1:]}
    return len(widths) == 1


def load_tensors(stored: StoredTensors | Path, tensors: Tensors, *, alone: bool = False) -> None:
    """Fill `tensors` in place from a finished checkpoint, which must hold all of them in their shapes.

    All ranks call it, each with its shards; where the tensors are whole, one may do so `alone`.
    """
    with nullcontext() if alone else all_or_none():
        stored = stored if isinstance(stored, StoredTensors) else StoredTensors(stored)
    try:
        dcp.load(tensors, storage_reader=stored, no_dist=alone or not dist.is_initialized())
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"Cannot restore '{stored.checkpoint}': {cause(error)}. The checkpoint is damaged, or the run's model "
            "settings (pretrained_model_root, LoRA, optimizer) differ from the checkpoint's."
        ) from error


def require_dtypes(stored: StoredTensors, tensors: Tensors) -> None:
    """Raise a ValueError where a tensor of `tensors` has another dtype in the checkpoint."""
    for group, named in tensors.items():
        for name, tensor in named.items():
            there = stored.metadata.state_dict_metadata.get(f"{group}.{name}")
            if there is not None and there.properties.dtype != tensor.dtype:
                raise ValueError(
                    f"'{stored.checkpoint}' has {group} {name} in {there.properties.dtype}, this run in "
                    f"{tensor.dtype}: resume with the master_weight_type of the run that saved it, on the same kind of "
                    "device."
                )


def cause(error: BaseException) -> str:
    """Return the last line of what an error of PyTorch's says, which names its root, without its full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].rstrip(".")


class FileRecord(BaseModel, strict=True, extra="forbid"):
    """Size in bytes and SHA-256 of a file."""

    size: NonNegativeInt
    sha256: str


class TensorRecord(BaseModel, strict=True, extra="forbid"):
    """Name of a tensor's dtype, and its shape."""

    dtype: str
    shape: Annotated[list[NonNegativeInt], Field(max_length=64)]


class Manifest(BaseModel, strict=True, extra="forbid"):
    """Files by their path in the checkpoint, and tensors by `group.name`."""

    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]


def tensor_records(metadata: Metadata) -> dict[str, TensorRecord]:
    """Return the tensors that PyTorch says it has written, or has found."""
    return {
        name: TensorRecord(dtype=str(stored.properties.dtype).removeprefix("torch."), shape=list(stored.size))
        for name, stored in metadata.state_dict_metadata.items()
    }


def hash_files(folder: Path) -> dict[str, FileRecord]:
    """Return a record of every file in a checkpoint but its manifest, by relative path; every rank reads a part."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with all_or_none():
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
        own = {str(path.relative_to(folder)): _record(path) for path in files[rank::world_size]}
    return {name: record for part in gather(own) for name, record in part.items()}


def write_manifest(folder: Path, files: Mapping[str, FileRecord], tensors: Mapping[str, TensorRecord]) -> None:
    """Write the manifest to `folder`, on disk before anything else happens."""
    manifest = Manifest(files=dict(sorted(files.items())), tensors=dict(tensors))
    write_synced(folder / MANIFEST, manifest.model_dump_json(indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a finished checkpoint; a ValueError unless its files are there and have their sizes."""
    what = f"'{folder}' is not a finished checkpoint: its {MANIFEST} cannot be read"
    with as_value_error(what, OSError, ValueError):
        manifest = Manifest.model_validate_json(read_file(folder / MANIFEST))
        for name in manifest.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name!r} lies outside the checkpoint")
    for name, record in manifest.files.items():
        size = _size_of(folder / name)
        if size != record.size:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(_damaged(folder, name, f"{found}, expected {record.size} bytes"))
    return manifest


def verify_files(folder: Path) -> None:
    """Raise a ValueError on all ranks unless a finished checkpoint has exactly the files of its manifest, unchanged."""
    with all_or_none():
        expected = read_manifest(folder).files
    advice = "Pass another checkpoint, or check the disk."
    with as_value_error(f"'{folder}' cannot be read", OSError, ValueError, advice=advice):
        received = hash_files(folder)
    if surplus := sorted(received.keys() - expected.keys()):
        raise ValueError(_damaged(folder, surplus[0], f"is not in its {MANIFEST}; move it away if you put it there"))
    for name, record in expected.items():
        if name not in received or received[name].sha256 != record.sha256:
            raise ValueError(_damaged(folder, name, "has other content than when it was written"))


def _size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None if there is no such file, or there can be none of that name."""
    with suppress(OSError, ValueError):
        return path.stat().st_size if path.is_file() else None


def _damaged(folder: Path, name: str, what: str) -> str:
    return f"'{folder}' is damaged: {name} {what}. Pass an older checkpoint with --resume_from_checkpoint PATH."


def _record(path: Path, *, sync: bool = False) -> FileRecord:
    """Read a file; with `sync` first wait until the disk has it."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return FileRecord(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
