"""The tensors of a distributed checkpoint, written with an index in JSON and read without unpickling anything.

PyTorch's own reader loads the index without a limit, and values that are not tensors likewise. This one reads tensors
only, from files beside the index, and takes apart itself what `torch.save` wrote.
"""

import io
import sys
import zipfile
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hyvideo.checkpoint.plain_pickle import Name, Record, read_pickle
from hyvideo.checkpoint.tensor_index import DTYPES, INDEX, MAX_AXES, TensorIndex
from hyvideo.data.files import write_synced

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""What `torch.save` calls the dtypes of old; it calls newer ones by their own names."""

ALLOWED = {
    "collections": {"OrderedDict"},
    "torch": {*STORAGES, *DTYPES},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_tensor_v3"},
    "torch.storage": {"UntypedStorage"},
}
"""Module -> names to which a saved tensor may refer."""

PIECE = 2**20
"""Most bytes read at once."""


class TensorWriter(FileSystemWriter):
    """Writes tensors as `FileSystemWriter` does, and the index as JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; the main rank alone calls it, with what all have written."""
        metadata.storage_data = {written.index: written.storage_data for rank in results for written in rank}
        write_synced(Path(self.path) / INDEX, TensorIndex.of(metadata).to_bytes())


class TensorReader(FileSystemReader):
    """Reads the tensors of a checkpoint folder, and nothing else.

    Pass it as `storage_reader` to `dcp.load`. Errors are ValueErrors that name the file.
    """

    def read_metadata(self) -> Metadata:
        """Read and check the index, once; see `TensorIndex.read`."""
        return self._metadata

    @cached_property
    def _metadata(self) -> Metadata:
        return TensorIndex.read(Path(self.path)).metadata()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of `plan`.

        Raises:
            ValueError: a tensor cannot be read.
        """
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            stored = read_tensor(Path(self.path) / place.relative_path, place.offset, place.length)
            target = planner.resolve_tensor(item).detach()
            part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
            if part.shape != target.shape:
                raise ValueError(
                    f"'{self.path}': a part of {item.storage_index.fqn} has another shape than its index says"
                )
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_tensor(path: Path, start: int, length: int) -> Tensor:
    """Return the tensor that `torch.save` wrote into `length` bytes of a file, from `start` on.

    It is a zip of the values and a pickle that says their dtype, shape and strides. Memory: those bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: something else is there.
    """
    where = f"'{path}' at {start}"
    try:
        with path.open("rb") as file, zipfile.ZipFile(_Slice(file, start, length)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
                raise ValueError("it is compressed")
            if sum(entry.file_size for entry in entries.values()) > length or entries["data.pkl"].file_size > PIECE:
                raise ValueError("its entries are too large")
            if "byteorder" in entries and _content(archive, entries["byteorder"]) != sys.byteorder.encode():
                raise ValueError("its bytes are in the other order")
            description = bytes(_content(archive, entries["data.pkl"]))
            dtype, offset, shape, strides = _described(read_pickle(description, ALLOWED, "its description"))
            if entries["data/0"].file_size != prod(shape) * dtype.itemsize:
                raise ValueError(f"{shape} of {dtype} in {entries['data/0'].file_size} bytes")
            content = _content(archive, entries["data/0"])
        values = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return values.view(dtype).as_strided(shape, strides, offset)
    except (zipfile.BadZipFile, EOFError, LookupError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"{where} is no tensor that can be read: {error}") from error


class _Slice(io.RawIOBase):
    """A part of a file. One call reads at most `PIECE` bytes: a zip with a longer list of entries is refused."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if position < 0:
            raise OSError("a position before the beginning")  # by which zipfile sees that no bytes are no zip
        self._position = position
        return position

    def readinto(self, buffer: memoryview) -> int:
        """Read at most a piece."""
        count = max(0, min(len(buffer), PIECE, self._length - self._position))
        self._file.seek(self._start + self._position)
        count = self._file.readinto(memoryview(buffer)[:count])
        self._position += count
        return count


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytearray:
    """Return the bytes of an entry, whose checksum is verified on the way."""
    content, position = bytearray(entry.file_size), 0
    with archive.open(entry) as stream:
        while piece := stream.read(PIECE):
            content[position : position + len(piece)] = piece
            position += len(piece)
    return content


def _described(value: Any) -> tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    """Return dtype, offset, shape and strides of a tensor from the pickle that says them.

    Raises:
        ValueError: it says something else.
    """
    match value:
        case Record(arguments=(Record(kind="", arguments=(("storage", Name(name=kind), "0", *_),)), *place, bool(), _)):
            dtype = STORAGES.get(kind)
        case Record(
            arguments=(Record(kind="", arguments=(("storage", _, "0", *_),)), *place, bool(), _, Name(name=kind))
        ):
            dtype = DTYPES.get(kind)
        case _:
            raise ValueError("it describes none")
    match dtype, place:
        case torch.dtype(), (int(offset), tuple(shape), tuple(strides)) if len(shape) == len(strides) <= MAX_AXES:
            if all(type(number) is int and number >= 0 for number in (offset, *shape, *strides)):
                return dtype, offset, shape, strides
    raise ValueError("it describes none")
