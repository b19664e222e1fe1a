"""Weights on disk, and networks that have no memory yet, which are filled from them tensor by tensor.

No file is ever held in memory as a whole: peak memory is the weights in their dtype plus what is read at a time. A
sharded network (FSDP2) is filled by each rank for itself, which reads the rows of its own shards and nothing else.
"""

import hashlib
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from accelerate.utils import set_module_tensor_to_device
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hyvideo.config.outside import as_value_error, check_file
from hyvideo.models.conversion import Naming, Part
from hyvideo.models.model_folder import read_index, readable

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Name of a precision in settings -> dtype."""

MAPPED_BYTES = 2**28
"""A file is reopened after this many bytes: what was read from a mapped file stays in memory until it is closed."""

_PRECISIONS = ("F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16)
_COUNTED = ("_ids", "_index", "_tracked")  # ends of the names of buffers, such as `position_ids`, that are no weights


class SafetensorsFolder:
    """The safetensors files of one folder: a single one, or shards with their index.

    None there, a shard of the index missing, a damaged file, an index that disagrees and quantized weights are a
    ValueError. `where` is what messages call it; `shapes` has the shape of every tensor, in the order in which reading
    is cheap.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._file_of: dict[str, Path] = {}
        self.shapes = {}
        self._open: tuple[Path, safe_open] | None = None
        self._bytes_read = 0
        files, indexes = sorted(folder.glob("*.safetensors")), sorted(folder.glob("*.safetensors.index.json"))
        if indexes:
            named = set(read_index(indexes[0]).values())
            files = [path for path in files if path.name in named]
            if missing := sorted(named - {path.name for path in files}):
                raise ValueError(
                    f"'{folder}' lacks {', '.join(missing)} of the {len(named)} files that {indexes[0].name} names. "
                    "Repeat the download of this folder (checkpoints-download.md); it fetches only what is missing."
                )
        if not files:
            raise ValueError(f"'{folder}' holds no *.safetensors file. Expected the weights of this component there.")
        for path in files:
            handle = _opened(path)
            for name in handle.offset_keys():
                view, self._file_of[name] = handle.get_slice(name), path
                self.shapes[name] = tuple(view.get_shape())
                check_precision(name, view.get_dtype(), path)
        for index in indexes:
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
        with readable(path, name):
            pieces = [view[:]] if rows is None else [view[start:stop] for start, stop in rows]
        self._bytes_read += sum(piece.nbytes for piece in pieces)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class StateDict:
    """Tensors in memory (or mapped there by `torch.load(mmap=True)`), read as a `SafetensorsFolder` is."""

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
    with readable(path, "tensors"):
        check_file(path)
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:  # its advice is to let the file run what it likes
            raise ValueError(f"'{path}' holds more than tensors, or is damaged; nothing of it was run.") from error
    content = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise ValueError(f"'{path}' holds a {type(content).__name__}; expected named tensors. Download it again.")
    return {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}


def _opened(path: Path) -> safe_open:
    """Open a file whose header and length are right."""
    what = f"Cannot read '{path}', {path.stat().st_size:,} bytes"
    advice = "The file is incomplete or damaged; download it again."
    with as_value_error(what, OSError, SafetensorError, advice=advice):
        check_file(path)
        return safe_open(path, framework="pt")


LISTED = 100
"""Most faulty keys of one kind that a message lists."""


@torch.no_grad()
def fill(
    module: nn.Module,
    source: SafetensorsFolder | StateDict,
    naming: Naming,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    ignored: Sequence[str] = (),
) -> None:
    """Give every tensor of `module`'s state dict its value from `source`; nothing is read before all fit.

    The module is on the meta device, and gets memory on `device` (None: in host memory) tensor by tensor, in `dtype`
    (None keeps that of the files), while buffers stay where they are; or its weights, whole or sharded with FSDP2, are
    overwritten. `naming` says where the source keeps the tensor of a name; None: nowhere, and the tensor stays as it
    is. Missing, unexpected (but for the prefixes `ignored`) and mis-shaped tensors are a ValueError that lists them.
    """
    parts, device = check_fit(module, source, naming, ignored), device or torch.device("cpu")
    order = {name: position for position, name in enumerate(source.shapes)}
    for name, part in sorted(parts.items(), key=lambda item: order[item[1].name]):
        weight = module.get_parameter(name)
        rows = weight.shape[0] if weight.ndim else 0
        if isinstance(weight, DTensor):
            local = weight.to_local()
            _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
            if local.numel():
                local.copy_(source.read(part.name, part.rows(offset[0], offset[0] + local.shape[0], rows)))
            continue
        stored = source.read(part.name, None if part == Part(part.name) else part.rows(0, rows, rows))
        if weight.is_meta:
            value = torch.empty(weight.shape, dtype=dtype or stored.dtype, device=device).copy_(stored)
            set_module_tensor_to_device(module, name, device, value=value, dtype=value.dtype)
        else:
            weight.copy_(stored)


def check_fit(
    module: nn.Module, source: SafetensorsFolder | StateDict, naming: Naming, ignored: Sequence[str] = ()
) -> dict[str, Part]:
    """Return where `source` holds each tensor of `module`, or raise the ValueError of `fill`, with its arguments."""
    parts = {name: part for name in module.state_dict() if (part := naming(name)) is not None}
    wanted = {part.name: part.shape(module.get_parameter(name).shape) for name, part in parts.items()}
    held = source.shapes
    faults = {
        "missing keys": sorted(set(wanted) - set(held)),
        "unexpected keys": sorted(n for n in set(held) - set(wanted) if not n.startswith(tuple(ignored))),
        "mis-shaped keys": [
            f"{name} (expected {list(wanted[name])}, received {list(held[name])})"
            for name in sorted(set(wanted) & set(held))
            if wanted[name] != held[name]
        ],
    }
    listed = []
    for kind, names in faults.items():
        rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        listed += [f"{kind}: {', '.join(names[:LISTED])}{rest}"] if names else []
    if listed:
        raise ValueError(
            f"The weights in '{source.where}' do not fit their config.json. {'; '.join(listed)}. Download this "
            "component again, or correct its config.json."
        )
    return parts


SAMPLES, SAMPLE_BYTES = 64, 2**16
"""Places of a file that are read, evenly spread, and how much at each; a file up to 4 MiB is read whole."""


def fingerprint(folders: Iterable[Path]) -> str:
    """Return 16 hexadecimal digits that change when files in `folders` do: in name, size or what is sampled.

    Where the folders lie, and whether by links, does not matter. Training moves every weight it trains, and 64 samples
    of a file meet them; a checkpoint's manifest is read whole, and holds the hashes of all its files. A folder may be
    one file, or not there and so empty. Notes of the program that downloaded them (`.cache`: when it ran) do not count.
    """
    digest = hashlib.sha256()
    for number, folder in enumerate(folders):
        walk = os.walk(folder, followlinks=True)
        files = [folder] if folder.is_file() else (Path(place, name) for place, _, names in walk for name in names)
        for path in sorted(path for path in files if path.is_file()):
            if ".cache" in path.relative_to(folder).parts:
                continue
            size = path.stat().st_size
            digest.update(f"{number} {path.relative_to(folder)!s} {size}\n".encode(errors="surrogateescape"))
            with path.open("rb") as file:
                for sample in range(SAMPLES):
                    file.seek(max(sample * SAMPLE_BYTES, (size - SAMPLE_BYTES) * sample // (SAMPLES - 1)))
                    digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
