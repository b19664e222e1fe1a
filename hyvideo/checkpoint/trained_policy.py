"""Take the trained policy out of a checkpoint, for sampling and export."""

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel

from hyvideo.checkpoint.tensors import StoredTensors, load_tensors
from hyvideo.checkpoint.train_state import FACTS, named_checkpoint, read_facts
from hyvideo.config.outside import as_value_error
from hyvideo.models.adapter import ADAPTER, ADAPTER_FILE, base_weight, check_lora, lora_config, without_memory


def load_trained_policy(
    transformer: HunyuanVideo15Transformer3DModel, checkpoint: str | Path, *, ema: bool = False
) -> None:
    """Put the trained weights of a run's checkpoint into the base model it was trained from, in place.

    Those are all weights, or only the LoRA adapter, which is then added; with `ema` the average of the weights. The
    transformer comes fresh from `load_transformer`, and the checkpoint is a folder `step_N` of a run's `checkpoints`,
    or `best` or `latest` there.
    """
    checkpoint = named_checkpoint(checkpoint)
    facts, stored = _read(checkpoint, ema=ema)
    if not {"lora", "trained"} <= set(facts):
        raise ValueError(f"'{checkpoint}' does not say what was trained: its facts.json lacks `lora` or `trained`.")
    if facts["lora"] is not None:
        with as_value_error(f"'{checkpoint}' has an adapter that does not fit this model", ValueError):
            _check_adapter(transformer, stored, facts)
            transformer.add_adapter(lora_config(**facts["lora"]), adapter_name=ADAPTER)
    weights = dict(transformer.named_parameters())
    unknown = sorted(set(facts["trained"]) - set(weights))
    if unknown:
        raise ValueError(
            f"'{checkpoint}' was trained from another model: this one has no weights {', '.join(unknown[:5])}"
            f"{' ...' if len(unknown) > 5 else ''} ({len(unknown)} in all). Pass the base model of that run "
            "(pretrained_model_root in its config.yaml) as --model_path."
        )
    policy = {name: weights[name].detach() for name in facts["trained"]}
    load_tensors(stored, {"ema" if ema else "policy": policy}, alone=True)


def _check_adapter(transformer: HunyuanVideo15Transformer3DModel, stored: StoredTensors, facts: dict[str, Any]) -> None:
    """Make sure that an adapter takes at most twice its tensors' memory in the checkpoint, whatever the facts say."""
    outline, tensors = without_memory(transformer), stored.metadata.state_dict_metadata
    with torch.device("meta"):
        outline.add_adapter(lora_config(**facts["lora"]), adapter_name=ADAPTER)
    count = {True: 0, False: 0}
    for name, parameter in outline.named_parameters():
        if base_weight(name) is None:
            found = tensors.get(f"policy.{name}")  # what no gradient reaches is not stored
            if found is not None and found.size != parameter.shape:
                raise ValueError(f"{name} is {tuple(found.size)}, expected {tuple(parameter.shape)}")
            count[found is not None] += parameter.numel()
    if count[False] > count[True]:
        raise ValueError(f"it holds {count[True]:,} of the {sum(count.values()):,} weights that its {FACTS} asks for")


def check_trained(arguments: argparse.Namespace) -> None:
    """Check `checkpoint_path`, `lora_path` and `ema` of a command line; both paths become what they stand for."""
    for name in ("checkpoint_path", "lora_path"):
        if getattr(arguments, name) == "":  # of a shell variable that is not set
            raise ValueError(f"--{name} is empty: leave it out to take the base model.")
    if arguments.checkpoint_path:
        arguments.checkpoint_path = str(named_checkpoint(arguments.checkpoint_path))
        check_checkpoint(arguments.checkpoint_path, ema=arguments.ema)
    elif arguments.ema:
        raise ValueError("--ema takes the average in a checkpoint: give --checkpoint_path.")
    if arguments.lora_path:
        path = check_lora(named_checkpoint(arguments.lora_path))
        arguments.lora_path = str(path.parent if path.name == ADAPTER_FILE else path)


def check_checkpoint(checkpoint: str | Path, *, ema: bool) -> None:
    """Raise a ValueError unless `checkpoint` is one that `load_trained_policy` reads; no weights are read."""
    _read(named_checkpoint(checkpoint), ema=ema)


def _read(checkpoint: Path, *, ema: bool) -> tuple[dict[str, Any], StoredTensors]:
    """Return the facts of a checkpoint and what tensors it holds."""
    facts, stored = read_facts(checkpoint), StoredTensors(checkpoint)
    if ema and not any(name.startswith("ema.") for name in stored.metadata.state_dict_metadata):
        raise ValueError(f"'{checkpoint}' has no average of the weights: only runs with ema_decay above 0 keep one.")
    return facts, stored
