"""Read distributed checkpoints you do not trust: their index is a pickle, which could run anything when loaded.

PyTorch's own reader loads the index `.metadata` without a limit, and values that are not tensors likewise. This one
lets the index build only what an index consists of, hides all non-tensors, and stays in the checkpoint's folder.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size"},
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
"""Module -> names that an index may refer to, besides `torch`'s dtypes; none runs code from the index."""


class TensorReader(FileSystemReader):
    """Reads the tensors of a checkpoint folder, and nothing else.

    Pass it as `storage_reader` to `dcp.load`. Errors are ValueErrors that name the folder.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index.

        Raises:
            ValueError: it refers to what is not part of an index, leads out of the folder, or is damaged.
        """
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file, str(path)).load_index()
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(
                    f"'{path}' leads to {info.relative_path!r}; the files of a checkpoint lie beside its index. Do not "
                    "use this checkpoint: it was made to read other files."
                )
        metadata.state_dict_metadata = {
            name: value
            for name, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _ForbiddenNameError(ValueError):
    """An index refers to what is not in ALLOWED."""


_DAMAGES = (
    *(pickle.UnpicklingError, EOFError),
    *(ArithmeticError, AttributeError, ImportError, LookupError, MemoryError, RuntimeError, TypeError, ValueError),
)
"""Errors that a damaged pickle of allowed objects raises."""


class _IndexUnpickler(pickle.Unpickler):
    """Makes only objects of ALLOWED."""

    def __init__(self, file: Any, where: str) -> None:
        super().__init__(file)
        self._where = where

    def load_index(self) -> Metadata:
        """Return the index.

        Raises:
            ValueError: it is not an index, or not allowed.
        """
        try:
            index = self.load()
        except _ForbiddenNameError:
            raise
        except _DAMAGES as error:
            raise ValueError(f"'{self._where}' is damaged: {error or type(error).__name__}.") from error
        if not _is_index(index):
            raise ValueError(f"'{self._where}' is not the index of a distributed checkpoint.")
        return index

    def find_class(self, module: str, name: str) -> Any:
        """Look a name up, if it is allowed."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in ALLOWED.get(module, ()):
            raise _ForbiddenNameError(
                f"'{self._where}' refers to {module}.{name}, which no checkpoint needs: loading it could run a "
                "stranger's code. Do not use this checkpoint; get it again from whoever made it."
            )
        return super().find_class(module, name)


def _is_index(value: object) -> bool:
    """Whether all that is read of an index is there, in its type."""
    match value:
        case Metadata(state_dict_metadata=dict(entries), storage_data=dict(places), storage_meta=StorageMeta()):
            return all(map(_is_entry, entries.values())) and all(map(_is_place, places.values()))
    return False


def _is_entry(value: object) -> bool:
    """Whether `value` describes a tensor or a non-tensor."""
    match value:
        case TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.dtype()), size=torch.Size(), chunks=list(chunks)
        ):
            return all(map(_is_chunk, chunks))
    return isinstance(value, BytesStorageMetadata)


def _is_chunk(value: object) -> bool:
    """Whether `value` describes a part of a tensor."""
    match value:
        case ChunkStorageMetadata(offsets=torch.Size(), sizes=torch.Size()):
            return True
    return False


def _is_place(value: object) -> bool:
    """Whether `value` describes a place in a file."""
    match value:
        case _StorageInfo(relative_path=str(), offset=int(), length=int()):
            return True
    return False
