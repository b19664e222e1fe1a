"""Take the trained policy out of a checkpoint, ours or the original training script's, for sampling and export."""

from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel

from hyvideo.checkpoint.original_checkpoint import is_original_checkpoint, load_original_checkpoint
from hyvideo.checkpoint.tensor_index import TensorIndex
from hyvideo.checkpoint.train_state import FACTS, load_tensors, read_facts
from hyvideo.models.adapter import ADAPTER, base_weight, lora_config, without_memory


def load_trained_policy(transformer: HunyuanVideo15Transformer3DModel, checkpoint: str | Path) -> None:
    """Put the trained weights of a run's checkpoint into the base model it was trained from, in place.

    A checkpoint of ours holds what was trained: all weights, or only the LoRA adapter, which is then added. One of
    the original training script (`checkpoint-N`) holds the network under the original names, and its adapter.

    Args:
        transformer: the base model, fresh from `load_transformer`.
        checkpoint: folder `step_N` of a run's `checkpoints`, or a `checkpoint-N`.

    Raises:
        ValueError: no readable checkpoint, or one that was trained from another model.
    """
    if is_original_checkpoint(Path(checkpoint)):
        load_original_checkpoint(transformer, Path(checkpoint))
        return
    facts = read_facts(Path(checkpoint))
    if not {"lora", "trained"} <= set(facts):
        raise ValueError(f"'{checkpoint}' does not say what was trained: its facts.json lacks `lora` or `trained`.")
    if facts["lora"] is not None:
        try:
            _check_adapter(transformer, Path(checkpoint), facts)
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
    load_tensors(Path(checkpoint), {"policy": policy}, alone=True)


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


def check_checkpoint(checkpoint: str | Path) -> None:
    """Raise a ValueError unless `checkpoint` is one that `load_trained_policy` reads; no weights are read."""
    if not is_original_checkpoint(Path(checkpoint)):
        read_facts(Path(checkpoint))
