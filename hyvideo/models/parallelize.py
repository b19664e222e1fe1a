"""Recipe that turns a loaded transformer into a trainable policy: what is frozen, LoRA, activation checkpointing."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import nn

from hyvideo.models.lora_keys import adapter_to_diffusers, has_original_keys
from hyvideo.models.quiet import quiet_diffusers

ADAPTER = "default"
ADAPTER_FILE = "pytorch_lora_weights.safetensors"


def prepare_policy(
    transformer: HunyuanVideo15Transformer3DModel,
    *,
    gradient_checkpointing: bool,
    lora: LoraConfig | None = None,
    pretrained_lora_path: str | None = None,
) -> HunyuanVideo15Transformer3DModel:
    """Make `transformer` ready for training, in place.

    Full fine-tuning trains every weight that can receive a gradient; with `lora` only the adapters. Dropout of the
    network stays off in rollout and replay alike (`eval` mode): the two must agree exactly.

    Args:
        transformer: the policy, attention installed.
        gradient_checkpointing: recompute every block in the backward pass instead of keeping its activations.
        lora: adapter to add, see `lora_config`.
        pretrained_lora_path: folder with the adapter to start from (as `save_lora` writes it); needs `lora`.

    Raises:
        ValueError: the adapter to start from is missing or does not fit the model or `lora`.
    """
    transformer.eval().requires_grad_(False)
    if lora is None:
        transformer.requires_grad_(True)
    elif pretrained_lora_path is None:
        transformer.add_adapter(lora, adapter_name=ADAPTER)
    else:
        load_lora(transformer, pretrained_lora_path)
        _check_same_adapter(transformer, lora, pretrained_lora_path)
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_("lora_" in name)
    _freeze_unreached(transformer)
    if gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    return transformer


def lora_config(rank: int, alpha: int, dropout: float, target_modules: Sequence[str]) -> LoraConfig:
    """Return the adapter's configuration; the second matrix starts at zero, so the policy starts as the base model.

    Raises:
        ValueError: `dropout` is not 0: a dropped weight would make the replayed log-probability differ.
    """
    if dropout != 0.0:
        raise ValueError(f"lora_dropout must be 0 for GRPO (the replay must repeat the rollout); received {dropout}.")
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(target_modules), init_lora_weights=True)


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name: what the optimizer, the anchor and a checkpoint hold."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def save_lora(transformer: HunyuanVideo15Transformer3DModel, folder: str | Path) -> None:
    """Write the adapter to `folder` as diffusers does (`pytorch_lora_weights.safetensors`, config in its metadata)."""
    with quiet_diffusers():
        transformer.save_lora_adapter(str(folder), adapter_name=ADAPTER)


def load_lora(transformer: HunyuanVideo15Transformer3DModel, folder: str | Path) -> None:
    """Add the adapter in `folder`: one that `save_lora` wrote, or one with the original names of the modules.

    Raises:
        ValueError: no readable adapter there, or it was made for another model.
    """
    path = Path(folder) / ADAPTER_FILE
    if not path.is_file():
        raise ValueError(f"lora path: no adapter at '{path}'. Expected the folder that holds that file.")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            note = (file.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
        settings = None if note is None else json.loads(note)
        if has_original_keys(tensors):
            tensors, settings = adapter_to_diffusers(tensors, settings, transformer.state_dict())
        transformer.load_lora_adapter(tensors, adapter_name=ADAPTER, prefix=None, metadata=settings)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"lora path: the adapter in '{path}' does not fit this transformer: {error}") from error
    surplus = sorted(set(tensors) - set(get_peft_model_state_dict(transformer, adapter_name=ADAPTER)))
    if surplus:
        raise ValueError(
            f"lora path: the adapter in '{path}' does not fit this transformer, which has no place for "
            f"{', '.join(surplus[:3])} ({len(surplus)} weights in all). Expected an adapter of this base model."
        )


def _check_same_adapter(transformer: HunyuanVideo15Transformer3DModel, wanted: LoraConfig, folder: str) -> None:
    """Refuse an adapter that differs from the run's settings: by these its checkpoints are read again."""
    loaded = transformer.peft_config[ADAPTER]
    flags = {"lora_r": "r", "lora_alpha": "lora_alpha"}
    differing = [
        f"{flag} is {getattr(wanted, name)}, the adapter has {getattr(loaded, name)}"
        for flag, name in flags.items()
        if getattr(wanted, name) != getattr(loaded, name)
    ]
    adapted = {name for name, module in transformer.named_modules() if isinstance(module, LoraLayer)}
    plain = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    plain -= {name for name in plain if name.startswith(tuple(f"{outer}." for outer in adapted))}
    chosen = {name for name in plain | adapted if check_target_module_exists(wanted, name)}
    if chosen != adapted:
        differing.append(
            f"lora_target_modules chooses {len(chosen)} modules, the adapter has {len(adapted)}, "
            f"which differ in {', '.join(sorted(chosen ^ adapted)[:3])}"
        )
    if loaded.rank_pattern or loaded.alpha_pattern:
        differing.append("the adapter's modules have several ranks or alphas")
    if differing:
        raise ValueError(
            f"pretrained_lora_path: the adapter in '{folder}' has other settings than the run: {'; '.join(differing)}. "
            "Set these flags to the adapter's."
        )


def _freeze_unreached(transformer: HunyuanVideo15Transformer3DModel) -> None:
    """Freeze what can never receive a gradient.

    The last block's condition stream ends there (its keys and values reach the video, its queries do not), the vision
    embedder sees no tokens in text-to-video, and a key's bias shifts all logits of a softmax alike (the refiner has no
    key norm), so its true gradient is 0 and Adam would follow noise.
    """
    last = transformer.transformer_blocks[-1]
    ends = (last.attn.add_q_proj, last.attn.norm_added_q, last.attn.to_add_out, last.ff_context)
    unseen = () if transformer.config.task_type == "i2v" else (transformer.image_embedder,)
    for module in (*ends, *unseen):
        module.requires_grad_(False)
    for block in transformer.context_embedder.token_refiner.refiner_blocks:
        if isinstance(block.attn.to_k, nn.Linear) and block.attn.to_k.bias is not None:
            block.attn.to_k.bias.requires_grad_(False)


def parameter_count(parameters: Sequence[torch.Tensor]) -> int:
    """Return the number of values in `parameters`."""
    return sum(parameter.numel() for parameter in parameters)
