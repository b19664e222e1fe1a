"""Take the trained policy out of a checkpoint, for sampling and export.

A checkpoint of ours holds what was trained. One of the original training script, `checkpoint-N`, holds the whole
network below `transformer`, in DCP under the original names, and after LoRA training its adapter in `lora/default`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

from hyvideo.checkpoint.tensor_index import TensorIndex
from hyvideo.checkpoint.tensor_reader import TensorReader
from hyvideo.checkpoint.train_state import FACTS, load_tensors, named_checkpoint, read_facts
from hyvideo.models.adapter import (
    ADAPTER,
    ADAPTER_FILE,
    base_weight,
    check_lora,
    load_lora,
    lora_config,
    without_memory,
)
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
            self._hold_from(name)
        tensor = self._held[name]
        return tensor if rows is None else torch.cat([tensor[start:stop] for start, stop in rows])

    def _hold_from(self, first: str) -> None:
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


def load_trained_policy(
    transformer: HunyuanVideo15Transformer3DModel, checkpoint: str | Path, *, ema: bool = False
) -> None:
    """Put the trained weights of a run's checkpoint into the base model it was trained from, in place.

    Those are all weights, or only the LoRA adapter, which is then added.

    Args:
        transformer: the base model, fresh from `load_transformer`.
        checkpoint: folder `step_N` of a run's `checkpoints`, `best` or `latest` there, or a `checkpoint-N`.
        ema: take the average of the weights instead.

    Raises:
        ValueError: no readable checkpoint, one without its adapter's file or without an average, or one that was
            trained from another model.
    """
    check_checkpoint(checkpoint, ema=ema)
    checkpoint = named_checkpoint(checkpoint)
    if _is_original(checkpoint):
        source, adapter = OriginalCheckpoint(checkpoint / "transformer"), checkpoint / "lora" / ADAPTER
        has_file = (adapter / ADAPTER_FILE).is_file()
        if source.has_adapter and not has_file:
            raise ValueError(
                f"'{checkpoint}' was trained with an adapter, but there is no '{adapter / ADAPTER_FILE}'. Copy it too."
            )
        fill(transformer, source, transformer_part)
        if has_file:
            load_lora(transformer, adapter)
        return
    facts = read_facts(checkpoint)
    if not {"lora", "trained"} <= set(facts):
        raise ValueError(f"'{checkpoint}' does not say what was trained: its facts.json lacks `lora` or `trained`.")
    if facts["lora"] is not None:
        try:
            _check_adapter(transformer, checkpoint, facts)
            transformer.add_adapter(lora_config(**facts["lora"]), adapter_name=ADAPTER)
        except ValueError as error:
            raise ValueError(f"'{checkpoint}' has an adapter that does not fit this model: {error}") from error
    weights = dict(transformer.named_parameters())
    unknown = sorted(set(facts["trained"]) - set(weights))
    if unknown:
        raise ValueError(
            f"'{checkpoint}' was trained from another model: this one has no weights {', '.join(unknown[:5])}"
            f"{' ...' if len(unknown) > 5 else ''} ({len(unknown)} in all). Pass the base model of that run "
            "(pretrained_model_root in its config.yaml) as --model_path."
        )
    policy = {name: weights[name].detach() for name in facts["trained"]}
    load_tensors(checkpoint, {"ema" if ema else "policy": policy}, alone=True)


def _check_adapter(transformer: HunyuanVideo15Transformer3DModel, checkpoint: Path, facts: dict[str, Any]) -> None:
    """Make sure that an adapter takes at most twice its tensors' memory in the checkpoint, whatever the facts say.

    Raises:
        ValueError: a tensor is of another shape, or most are missing.
    """
    outline, stored = without_memory(transformer), TensorIndex.read(checkpoint).tensors
    with torch.device("meta"):
        outline.add_adapter(lora_config(**facts["lora"]), adapter_name=ADAPTER)
    count = {True: 0, False: 0}
    for name, parameter in outline.named_parameters():
        if base_weight(name) is None:
            found = stored.get(f"policy.{name}")  # what no gradient reaches is not stored
            if found is not None and found.shape != parameter.shape:
                raise ValueError(f"{name} is {found.shape}, expected {tuple(parameter.shape)}")
            count[found is not None] += parameter.numel()
    if count[False] > count[True]:
        raise ValueError(f"it holds {count[True]:,} of the {sum(count.values()):,} weights that its {FACTS} asks for")


def check_trained(arguments: argparse.Namespace) -> None:
    """Check `checkpoint_path`, `lora_path` and `ema` of a command line, and replace both paths by what they stand for.

    Raises:
        ValueError: a path is not readable weights, or `ema` asks for an average that is not there; nothing is loaded.
    """
    if arguments.checkpoint_path:
        arguments.checkpoint_path = str(named_checkpoint(arguments.checkpoint_path))
        check_checkpoint(arguments.checkpoint_path, ema=arguments.ema)
    elif arguments.ema:
        raise ValueError("--ema takes the average in a checkpoint: give --checkpoint_path.")
    if arguments.lora_path:
        arguments.lora_path = str(check_lora(named_checkpoint(arguments.lora_path)).parent)


def check_checkpoint(checkpoint: str | Path, *, ema: bool = False) -> None:
    """Raise a ValueError unless `checkpoint` is one that `load_trained_policy` reads; no weights are read."""
    checkpoint = named_checkpoint(checkpoint)
    original = _is_original(checkpoint)
    if not original:
        read_facts(checkpoint)
    try:
        names = TensorIndex.read(checkpoint / "transformer" if original else checkpoint).tensors
    except (OSError, ValueError) as error:
        raise ValueError(f"'{checkpoint}' is not a readable checkpoint: {error}. Copy it again, whole.") from error
    if ema and (original or not any(name.startswith("ema.") for name in names)):
        raise ValueError(f"'{checkpoint}' has no average of the weights: only runs with ema_decay above 0 keep one.")


def _is_original(checkpoint: Path) -> bool:
    """Whether a checkpoint is one of the original training script."""
    return (checkpoint / "transformer" / ".metadata").is_file()
