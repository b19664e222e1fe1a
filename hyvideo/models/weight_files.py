"""Weights on disk that are read tensor by tensor, or by rows of one, without ever holding a whole file in memory."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyvideo.models.model_folder import read_index, readable

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Name of a precision in settings -> dtype."""

MAPPED_BYTES = 2**28
"""A file is reopened after this many bytes: what was read from a mapped file stays in memory until it is closed."""

_PRECISIONS = ("F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16)
_COUNTED = ("_ids", "_index", "_tracked")  # ends of the names of buffers, such as `position_ids`, that are no weights


class WeightSource(ABC):
    """Named tensors that can be read piecewise.

    Attributes:
        where: what messages call it.
        fits: what the tensors must fit, in messages.
        advice: what to do if they do not, in messages.
        shapes: shape of every tensor; iteration gives the order in which reading is cheap.
    """

    where: str
    fits = "their config.json"
    advice = "Download this component again, or correct its config.json."
    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def read(self, name: str, rows: Sequence[tuple[int, int]] | None) -> Tensor:
        """Return tensor `name`, or its row ranges `rows` one after the other."""


class SafetensorsFolder(WeightSource):
    """The safetensors files of one folder: a single one, or shards with their index.

    Raises:
        ValueError: none there, a shard of the index is missing, a file is damaged, index and files disagree, or weights
            are quantized.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._file_of: dict[str, Path] = {}
        self.shapes = {}
        self._open: tuple[Path, safe_open] | None = None
        self._bytes_read = 0
        for path in _safetensors_files(folder):
            handle = _opened(path)
            for name in handle.offset_keys():
                view, self._file_of[name] = handle.get_slice(name), path
                self.shapes[name] = tuple(view.get_shape())
                check_precision(name, view.get_dtype(), path)
        for index in folder.glob("*.safetensors.index.json"):
            held = {(name, path.name) for name, path in self._file_of.items()}
            if differing := sorted(set(read_index(index).items()) ^ held):
                names = ", ".join(f"{name} ({file})" for name, file in differing[:10])
                raise ValueError(
                    f"'{index}' and its files disagree about {len(differing)} entries: {names}"
                    f"{' ...' if len(differing) > 10 else ''}. Files of two downloads seem mixed; fetch the folder "
                    "again."
                )

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None) -> Tensor:
        """Return tensor `name`, or its row ranges `rows` one after the other."""
        path = self._file_of[name]
        if self._open is None or self._open[0] != path or self._bytes_read > MAPPED_BYTES:
            self._open, self._bytes_read = (path, _opened(path)), 0
        view = self._open[1].get_slice(name)
        try:
            pieces = [view[:]] if rows is None else [view[start:stop] for start, stop in rows]
        except (SafetensorError, RuntimeError, IndexError) as error:
            raise ValueError(f"Cannot read {name} of '{path}': {error}. Download the file again.") from error
        self._bytes_read += sum(piece.nbytes for piece in pieces)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def close(self) -> None:
        """Close the open file, and free the memory it is mapped into."""
        self._open = None


class StateDict(WeightSource):
    """Tensors in memory (or mapped there by `torch.load(mmap=True)`) as a weight source; none may be quantized."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.where = where
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._tensors = tensors
        for name, tensor in tensors.items():
            check_precision(name, tensor.dtype, where)

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None) -> Tensor:
        """Return tensor `name`, or its row ranges `rows` one after the other."""
        tensor = self._tensors[name]
        return tensor if rows is None else torch.cat([tensor[start:stop] for start, stop in rows])


def check_precision(name: str, dtype: str | torch.dtype, where: str | Path) -> None:
    """Raise a ValueError if a tensor of the file `where` is quantized: read as numbers, it would sample noise."""
    if dtype not in _PRECISIONS and not (dtype in ("I64", torch.int64) and name.endswith(_COUNTED)):
        raise ValueError(
            f"'{where}': {name} is of {dtype}, so its weights are quantized, and this project does not scale them "
            "back. Use the bf16, fp16 or fp32 weights of this model."
        )


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `torch.save` wrote, or of its `state_dict`, mapped into memory.

    What it has beside tensors is left out. PyTorch's restricted unpickler reads it, and only files that can be mapped;
    what it refuses is a ValueError.
    """
    _require_file(path)
    with readable(path, "tensors"):
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:  # its advice is to let the file run what it likes
            raise ValueError(f"'{path}' holds more than tensors, or is damaged; nothing of it was run.") from error
    content = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise ValueError(f"'{path}' holds a {type(content).__name__}; expected named tensors. Download it again.")
    return {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"'{path}' is a folder, pipe or device, or a link to nothing. Download it again.")


def _safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files in `folder`: those its index names, or all there are; a ValueError without any."""
    files = sorted(folder.glob("*.safetensors"))
    for index in sorted(folder.glob("*.safetensors.index.json"))[:1]:
        named = set(read_index(index).values())
        files = [path for path in files if path.name in named]
        if missing := sorted(named - {path.name for path in files}):
            raise ValueError(
                f"'{folder}' lacks {', '.join(missing)} of the {len(named)} files that {index.name} names. Repeat the "
                "download of this folder (checkpoints-download.md); it fetches only what is missing."
            )
    if not files:
        raise ValueError(f"'{folder}' holds no *.safetensors file. Expected the weights of this component there.")
    return files


def _opened(path: Path) -> safe_open:
    """Open a file whose header and length are right."""
    _require_file(path)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"Cannot read '{path}', {path.stat().st_size:,} bytes: {error}. The file is incomplete or damaged; "
            "download it again."
        ) from error
