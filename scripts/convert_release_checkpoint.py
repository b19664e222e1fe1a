"""Convert a checkpoint of the original training script into a transformer folder of the original layout.

Its index is a pickle. Here every name in it becomes an empty class, so that no code of a library is called, but a
pickle can still fill the memory or end the program: do not open one that a stranger made.

Example: `python -m scripts.convert_release_checkpoint outputs/checkpoint-100
--config ckpts/transformer/480p_t2v/config.json --output_path ckpts/transformer/480p_t2v_mine`, then
`python generate.py --model_path ckpts --transformer_version 480p_t2v_mine ...`. After LoRA training also pass
`--lora_path outputs/checkpoint-100/lora/default`.
"""

import argparse
import io
import json
import pickle
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from hyvideo.checkpoint.export import MAX_SHARD_SIZE, new_folder
from hyvideo.config.flags import Parser
from hyvideo.config.outside import check_file, complain, read_file
from hyvideo.models.model_folder import read_json

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
METADATA = "torch.distributed.checkpoint.metadata"
KNOWN = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((module, kind) for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath")),
    (METADATA, "BytesStorageMetadata"),
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "Metadata"),
    (METADATA, "MetadataIndex"),
    (METADATA, "StorageMeta"),
    (METADATA, "TensorProperties"),
    (METADATA, "TensorStorageMetadata"),
    (METADATA, "_MEM_FORMAT_ENCODING"),
}
"""Module and name of all that an index refers to, dtypes aside."""


class _StandIn:
    """Keeps what an object would be made of. Each name of each pickle gets a class of its own, derived from this."""

    def __new__(cls, *arguments: Any) -> "_StandIn":
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Inert(pickle.Unpickler):
    """Looks nothing up: a name becomes a new class that does nothing, so no class of anyone else can be changed."""

    def find_class(self, module: str, name: str) -> type:
        """Return the stand-in for a name that is known."""
        if (module, name) not in KNOWN and not (module == "torch" and name in DTYPES):
            raise ValueError(f"it refers to {module[:80]}.{name[:80]}, which no index needs")
        return type(name, (_StandIn,), {})


def release_tensors(folder: Path) -> tuple[dict[str, Tensor], bool]:
    """Return the network's tensors by their original names, and whether an adapter was trained beside them.

    Args:
        folder: `checkpoint-N/transformer`, a checkpoint of `torch.distributed.checkpoint` with a pickled index.

    Raises:
        ValueError: it cannot be read, or a part of a tensor is missing.
    """
    try:
        index = _Inert(io.BytesIO(read_file(folder / ".metadata", 2**29))).load().state
        places = {
            (key.state["fqn"], _numbers(key.state["offset"])): at.state
            for key, at in index["storage_data"].items()
            if key.state.get("offset") is not None  # else it is no tensor
        }
        stored = index["state_dict_metadata"]
        names = [
            name for name in stored if name.startswith("model.") and "chunks" in getattr(stored[name], "state", ())
        ]
        tensors = {
            name.removeprefix("model.").replace(".base_layer.", "."): _whole(folder, name, stored[name].state, places)
            for name in names
            if ".lora_" not in name
        }
    except Exception as error:  # whatever a damaged pickle leads to
        raise ValueError(f"'{folder}' cannot be converted: {type(error).__name__}: {str(error)[:500]}") from error
    return tensors, any(".lora_" in name for name in names)


def _numbers(size: _StandIn) -> tuple[int, ...]:
    """Return the integers of a `torch.Size`."""
    return tuple(map(int, *size.arguments))


def _whole(folder: Path, name: str, stored: dict[str, Any], places: dict[tuple, dict[str, Any]]) -> Tensor:
    """Put a tensor together from its parts."""
    shape, parts = _numbers(stored["size"]), []
    for chunk in stored["chunks"]:
        offsets = _numbers(chunk.state["offsets"])
        place = places[name, offsets]
        if Path(place["relative_path"]).name != place["relative_path"]:
            raise ValueError(f"{name} lies outside the folder")
        path = folder / place["relative_path"]
        check_file(path)
        with path.open("rb") as file:
            file.seek(place["offset"])
            saved = io.BytesIO(file.read(place["length"]))
        parts.append((offsets, torch.load(saved, map_location="cpu", weights_only=True)))
    if not parts or sum(part.numel() for _, part in parts) != prod(shape):
        raise ValueError(f"{name} is not there as a whole")
    tensor = torch.empty(shape, dtype=parts[0][1].dtype)
    for offsets, part in parts:
        place = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        if tensor[place].shape != part.shape:
            raise ValueError(f"{name} has a part outside of it")
        tensor[place] = part
    return tensor


def main(argv: list[str]) -> int:
    """Convert; returns the exit status (0 done, 2 wrong input)."""
    parser = Parser(
        "scripts.convert_release_checkpoint", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="outputs/checkpoint-N of the original training script")
    parser.add_argument("--config", type=Path, required=True, help="config.json of the transformer it was trained from")
    parser.add_argument("--output_path", type=Path, required=True, help="a new folder; its name is the version's")
    arguments = parser.parse_args(argv)
    root = arguments.checkpoint.parent if arguments.checkpoint.name == "transformer" else arguments.checkpoint
    try:
        config = read_json(arguments.config)
        tensors, has_adapter = release_tensors(root / "transformer")
        with new_folder(arguments.output_path) as unfinished:
            (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            pattern = "diffusion_pytorch_model{suffix}.safetensors"
            save_torch_state_dict(tensors, unfinished, filename_pattern=pattern, max_shard_size=MAX_SHARD_SIZE)
    except (ValueError, OSError) as error:
        complain(f"scripts.convert_release_checkpoint: {error}")
        return 2
    adapter = f"; pass --lora_path {root / 'lora' / 'default'} with it" if has_adapter else ""
    print(f"wrote {arguments.output_path}{adapter}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
