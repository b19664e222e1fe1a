"""What tensors a checkpoint holds and where: our `index.json`, or the pickle `.metadata` that PyTorch writes itself.

The pickle is that of the original training script, and of this project's earlier versions. Either becomes a
`TensorIndex`, and is checked against the files beside it, before PyTorch sees any of it.
"""

from collections import Counter, defaultdict
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hyvideo.checkpoint.plain_pickle import Name, Record, read_pickle
from hyvideo.config.outside import read_file

INDEX = "index.json"
PICKLED_INDEX = ".metadata"

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size", *DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""Module -> names to which a pickled index may refer."""

MAX_BYTES, MAX_AXES, MAX_PARTS, MAX_CUT = 2**29, 64, 2**21, 3
"""Bounds on an index: a part takes about 90 bytes, but a pickle of few bytes can repeat what it has said many times. A
tensor is cut along few axes, for each doubles the time to check its parts; PyTorch takes one or two."""


def _beside(name: str) -> str:
    if Path(name).name != name or name in ("", ".."):
        raise ValueError(f"it leads to {name[:80]!r}")
    return name


def _known(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"there is no dtype {name[:80]!r}")
    return name


_STRICT = ConfigDict(strict=True, extra="forbid")
_Number = Annotated[int, Field(ge=0, lt=2**63)]
_Numbers = Annotated[tuple[_Number, ...], Field(max_length=MAX_AXES)]


@dataclass(frozen=True, config=_STRICT)
class Part:
    """A box of a tensor, its first element at `offsets`, and the bytes that hold it, which `torch.save` wrote.

    Attributes:
        file: name of a file beside the index.
        start, length: first byte there and number of bytes.
    """

    offsets: _Numbers
    shape: _Numbers
    file: Annotated[str, AfterValidator(_beside)]
    start: _Number
    length: _Number


@dataclass(frozen=True, config=_STRICT)
class StoredTensor:
    """A tensor: the name of its dtype, its shape, and the parts that make it up."""

    dtype: Annotated[str, AfterValidator(_known)]
    shape: _Numbers
    parts: Annotated[list[Part], Field(max_length=MAX_PARTS)]

    def is_made_up(self) -> bool:
        """Whether the parts, which lie within the tensor, cover every element once.

        Then their corners, with signs as the fields of a chessboard, cancel out but for those of the whole.
        """
        boxes = [(part.offsets, part.shape, 1) for part in self.parts] + [((0,) * len(self.shape), self.shape, -1)]
        boxes, left = [box for box in boxes if prod(box[1])], Counter()
        cut = [axis for axis, size in enumerate(self.shape) if any(box[1][axis] != size for box in boxes)]
        for offsets, shape, sign in boxes if len(cut) <= MAX_CUT else ():
            for ends in product((0, 1), repeat=len(cut)):
                corner = tuple(offsets[axis] + end * shape[axis] for axis, end in zip(cut, ends, strict=True))
                left[corner] += sign * (-1) ** sum(ends)
        return len(cut) <= MAX_CUT and not any(left.values())


@dataclass(frozen=True, config=_STRICT)
class TensorIndex:
    """The tensors of a checkpoint by name; values of other kinds are left out."""

    tensors: dict[str, StoredTensor]

    @classmethod
    def of(cls, metadata: Metadata) -> "TensorIndex":
        """Return what PyTorch says of a checkpoint that it has written."""
        places = metadata.storage_data

        def stored(name: str, entry: TensorStorageMetadata) -> StoredTensor:
            """Return where the parts of one tensor lie."""
            parts = [(chunk, places[MetadataIndex(name, chunk.offsets)]) for chunk in entry.chunks]
            return StoredTensor(
                str(entry.properties.dtype).removeprefix("torch."),
                tuple(entry.size),
                [
                    Part(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length)
                    for chunk, place in parts
                ],
            )

        return cls({name: stored(name, entry) for name, entry in metadata.state_dict_metadata.items()})

    @classmethod
    def read(cls, folder: Path) -> "TensorIndex":
        """Read the index of `folder` and compare it with the files there.

        Raises:
            OSError: there is none, or it cannot be read.
            ValueError: it is damaged, refers to what is not part of an index, leads out of the folder, or does not
                fit the files.
        """
        path = folder / INDEX if (folder / INDEX).exists() else folder / PICKLED_INDEX
        content = read_file(path, MAX_BYTES)
        try:
            if path.name == INDEX:
                index = TypeAdapter(cls).validate_json(content)
            else:
                index = _from_pickle(read_pickle(content, ALLOWED, f"'{path}'"), f"'{path}'")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            said = f"{'.'.join(map(str, first['loc']))[-200:]}: {first['msg'].removeprefix('Value error, ')}"
            if "it leads to" in said:
                raise ValueError(
                    f"'{path}' says of {said}; the files of a checkpoint lie beside its index. Do not use this "
                    "checkpoint: it was made to read other files."
                ) from None
            raise ValueError(f"'{path}' is not the index of a distributed checkpoint: {said}.") from None
        index._check(path)
        return index

    def to_bytes(self) -> bytes:
        """Return the content of `index.json`."""
        return TypeAdapter(TensorIndex).dump_json(self)

    def metadata(self) -> Metadata:
        """Return the index as PyTorch's loader takes it."""
        places = {
            MetadataIndex(name, part.offsets): _StorageInfo(part.file, part.start, part.length)
            for name, tensor in self.tensors.items()
            for part in tensor.parts
        }
        entries = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[tensor.dtype]),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in tensor.parts],
            )
            for name, tensor in self.tensors.items()
        }
        return Metadata(state_dict_metadata=entries, storage_data=places, storage_meta=StorageMeta())

    def _check(self, path: Path) -> None:
        """Make sure that the parts of every tensor fit into it, fill it, and are as large as it says, each by itself.

        Raises:
            ValueError: they do not, or a file is missing.
        """
        sizes: dict[str, int] = {}
        taken: dict[str, int] = defaultdict(int)
        for name, tensor in self.tensors.items():
            bytes_each = DTYPES[tensor.dtype].itemsize
            for part in tensor.parts:
                if part.file not in sizes:
                    sizes[part.file] = _size_of(path.with_name(part.file), path)
                fault = None
                if not len(part.offsets) == len(part.shape) == len(tensor.shape) or (
                    prod(part.shape)
                    and any(
                        offset + size > whole
                        for offset, size, whole in zip(part.offsets, part.shape, tensor.shape, strict=True)
                    )
                ):
                    fault = f"has a part {part.shape} at {part.offsets} of a tensor {tensor.shape}"
                elif part.start + part.length > sizes[part.file]:
                    fault = f"has {part.length} bytes at {part.start} of {part.file}, which has {sizes[part.file]}"
                elif prod(part.shape) * bytes_each > part.length:
                    fault = f"has a part {part.shape} of {tensor.dtype} in {part.length} bytes"
                if fault:
                    raise ValueError(f"'{path}' is damaged: {name[:200]} {fault}.")
            if not tensor.is_made_up():
                raise ValueError(f"'{path}' is damaged: the parts of {name[:200]} do not make it up.")
            for part in {part.offsets: part for part in tensor.parts}.values():  # ranks may share an empty one
                taken[part.file] += part.length
        for file, count in taken.items():
            if count > sizes[file]:
                raise ValueError(f"'{path}' is damaged: {count} bytes of tensors in {file}, which has {sizes[file]}.")


def _size_of(file: Path, path: Path) -> int:
    """Return the size in bytes of a file that an index names.

    Raises:
        ValueError: there is no such file.
    """
    try:
        if file.is_file():
            return file.stat().st_size
    except (OSError, ValueError):  # a name that no file can have
        pass
    raise ValueError(f"'{path}' names {file.name[:80]!r}, but there is no such file. Copy the checkpoint again, whole.")


class _NotAnIndexError(ValueError):
    """A pickle holds something else than expected."""


def _from_pickle(value: Any, where: str) -> TensorIndex:
    """Take the tensors out of a pickled index: to a fixed depth, and each part once.

    Raises:
        ValueError: it is none.
    """
    try:
        index = _state(value, "Metadata")
        places = {
            (_a(str, key["fqn"]), _numbers(key.get("offset"))): _state(info, "_StorageInfo")
            for record, info in _a(dict, index["storage_data"]).items()
            if (key := _state(record, "MetadataIndex")).get("offset") is not None
        }
        left, tensors = MAX_PARTS, {}
        for name, entry in _a(dict, index["state_dict_metadata"]).items():
            if isinstance(entry, Record) and entry.kind == "BytesStorageMetadata":
                continue
            state = _state(entry, "TensorStorageMetadata")
            chunks = _a(list, state["chunks"])
            left -= len(chunks)
            if left < 0:
                raise _NotAnIndexError(f"it has more than {MAX_PARTS:,} parts of tensors")
            parts = [_part(_a(str, name), _state(chunk, "ChunkStorageMetadata"), places, where) for chunk in chunks]
            tensors[name] = StoredTensor(_dtype(state["properties"]), _numbers(state["size"]), parts)
        return TensorIndex(tensors)
    except (KeyError, _NotAnIndexError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{where} is not the index of a distributed checkpoint: {reason[:200]}.") from None


def _part(name: str, chunk: dict, places: dict[tuple, dict], where: str) -> Part:
    """Return a part of the tensor `name`."""
    offsets = _numbers(chunk["offsets"])
    place = places[name, offsets]
    if place.get("transform_descriptors"):
        raise ValueError(f"{where}: the tensors are compressed. Save the checkpoint without extensions.")
    return Part(offsets, _numbers(chunk["sizes"]), place["relative_path"], place["offset"], place["length"])


def _a(kind: type, value: Any) -> Any:
    """Return `value` if it is of that kind."""
    if not isinstance(value, kind):
        raise _NotAnIndexError(f"expected a {kind.__name__}, received a {type(value).__name__}")
    return value


def _state(value: Any, kind: str) -> dict:
    """Return the state of a record of that kind."""
    if _a(Record, value).kind != kind:
        raise _NotAnIndexError(f"expected a {kind}, received a {value.kind}")
    return _a(dict, value.state)


def _numbers(value: Any) -> tuple[int, ...]:
    """Return the integers of a `torch.Size`."""
    match value:
        case Record(kind="Size", arguments=(tuple(numbers),)) if len(numbers) <= MAX_AXES:
            if all(type(number) is int for number in numbers):
                return numbers
    raise _NotAnIndexError("a shape or an offset is not a list of whole numbers")


def _dtype(properties: Any) -> str:
    """Return the name of the dtype in a record of a tensor's properties."""
    match properties:
        case Record(kind="TensorProperties", state=(Name(module="torch", name=name), *_)):
            return name
    raise _NotAnIndexError("a tensor has no dtype")
