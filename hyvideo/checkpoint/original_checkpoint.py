"""Checkpoints of the original training script: DCP under the original names, an adapter beside it after LoRA training.

`checkpoint-N/transformer` holds the whole network below `model.`; `checkpoint-N/lora/default` the adapter.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

from hyvideo.checkpoint.tensor_reader import TensorReader
from hyvideo.checkpoint.train_state import load_tensors
from hyvideo.models.adapter import ADAPTER, ADAPTER_FILE, load_lora
from hyvideo.models.conversion import transformer_part
from hyvideo.models.streaming import fill

READ_AHEAD = 2**30
"""Bytes read at once: opening a sharded checkpoint is slow, and its tensors are asked for in order."""


class OriginalCheckpoint:
    """The network of a DCP checkpoint as a weight source, by original names.

    Args:
        folder: `checkpoint-N/transformer`.

    Raises:
        ValueError: it cannot be read, or holds no network.
    """

    fits = "this transformer"
    advice = "Pass the base model that this checkpoint was trained from as --model_path."

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        try:
            self._reader = TensorReader(folder)
            stored = self._reader.read_metadata().state_dict_metadata
        except (OSError, ValueError) as error:
            raise ValueError(f"'{folder}' is not a readable checkpoint: {error}. Copy it again, whole.") from error
        self.has_adapter = any(".lora_" in key for key in stored)
        self._keys = {
            key.removeprefix("model.").replace(".base_layer.", "."): (key.removeprefix("model."), metadata)
            for key, metadata in stored.items()
            if key.startswith("model.") and ".lora_" not in key
        }
        self.shapes = {name: tuple(metadata.size) for name, (_, metadata) in self._keys.items()}
        self._held: dict[str, Tensor] = {}

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None) -> Tensor:
        """Return tensor `name`, or its row ranges `rows` one after the other."""
        if name not in self._held:
            self._read_from(name)
        tensor = self._held[name]
        return tensor if rows is None else torch.cat([tensor[start:stop] for start, stop in rows])

    def _read_from(self, first: str) -> None:
        """Replace what is held by `first` and the tensors after it, up to `READ_AHEAD` bytes."""
        names, size = list(self._keys), 0
        wanted: dict[str, Tensor] = {}
        for name in names[names.index(first) :]:
            key, metadata = self._keys[name]
            size += metadata.size.numel() * metadata.properties.dtype.itemsize
            if wanted and size > READ_AHEAD:
                break
            wanted[key] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
        self._held = {}
        load_tensors(self._folder, {"model": wanted}, alone=True, reader=self._reader)
        self._held = {name: wanted[key] for name, (key, _) in self._keys.items() if key in wanted}


def is_original_checkpoint(checkpoint: Path) -> bool:
    """Whether `checkpoint` is one of the original training script."""
    return (checkpoint / "transformer" / ".metadata").is_file()


def load_original_checkpoint(transformer: HunyuanVideo15Transformer3DModel, checkpoint: Path) -> None:
    """Put the network of `checkpoint` into `transformer`, in place, and add its adapter where it has one.

    Raises:
        ValueError: it cannot be read, lacks its adapter's file, or is of another model; nothing was changed if
            tensors do not fit.
    """
    source, adapter = OriginalCheckpoint(checkpoint / "transformer"), checkpoint / "lora" / ADAPTER
    if source.has_adapter and not (adapter / ADAPTER_FILE).is_file():
        raise ValueError(
            f"'{checkpoint}' was trained with an adapter, but there is no '{adapter / ADAPTER_FILE}'. Copy it too."
        )
    fill(transformer, source, transformer_part)
    if (adapter / ADAPTER_FILE).is_file():
        load_lora(transformer, adapter)
