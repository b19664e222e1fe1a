"""Recipe that turns a loaded transformer into a trainable policy: what is frozen, LoRA, activation checkpointing."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from peft import LoraConfig
from torch import nn

ADAPTER = "default"


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
        ValueError: the adapter to start from is missing or does not fit.
    """
    transformer.eval().requires_grad_(False)
    if lora is None:
        transformer.requires_grad_(True)
        _freeze_unreached(transformer)
    elif pretrained_lora_path is None:
        transformer.add_adapter(lora, adapter_name=ADAPTER)
    else:
        load_lora(transformer, pretrained_lora_path)
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_("lora_" in name)
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
    transformer.save_lora_adapter(str(folder), adapter_name=ADAPTER)


def load_lora(transformer: HunyuanVideo15Transformer3DModel, folder: str | Path) -> None:
    """Add the adapter that `save_lora` wrote to `folder`.

    Raises:
        ValueError: no adapter there, or it was made for another model.
    """
    path = Path(folder) / "pytorch_lora_weights.safetensors"
    if not path.is_file():
        raise ValueError(f"lora path: no adapter at '{path}'. Expected the folder that holds that file.")
    try:
        transformer.load_lora_adapter(str(path.parent), adapter_name=ADAPTER, prefix=None)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"lora path: the adapter in '{path}' does not fit this transformer: {error}") from error


def _freeze_unreached(transformer: HunyuanVideo15Transformer3DModel) -> None:
    """Freeze what can never receive a gradient in text-to-video training.

    The last block's condition stream ends there, the vision embedder sees no tokens, and a key's bias shifts all
    logits of a softmax alike (the refiner has no key norm), so its true gradient is 0 and Adam would follow noise.
    """
    last = transformer.transformer_blocks[-1]
    for module in (last.attn.to_add_out, last.ff_context, transformer.image_embedder):
        module.requires_grad_(False)
    for block in transformer.context_embedder.token_refiner.refiner_blocks:
        if isinstance(block.attn.to_k, nn.Linear) and block.attn.to_k.bias is not None:
            block.attn.to_k.bias.requires_grad_(False)


def parameter_count(parameters: Sequence[torch.Tensor]) -> int:
    """Return the number of values in `parameters`."""
    return sum(parameter.numel() for parameter in parameters)
