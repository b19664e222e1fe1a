"""Adapters of other programs do here what they do there, and ours do there what they do here.

What the programs compute is written again in this module, from their names and `alpha / rank * B @ A`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from hyvideo.models.adapter import load_lora
from tests.support.original_layout import original_transformer, original_transformer_tensors
from tests.support.tiny_model import transformer_call

Weights = dict[str, Tensor]
RANK, ALPHA, CLOSE = 6, 9, 1e-6


def diffusers(state: Weights) -> Weights:
    return dict(state)


def fused(state: Weights) -> Weights:
    """The weights of the original layout, with queries, keys and values in one, as diffusion-pipe names them."""
    weights = original_transformer_tensors(state)
    for name in [name for name in weights if re.search("_attn_q.weight", name)]:
        weights[name.replace("_q.", "_qkv.")] = torch.cat([weights.pop(name.replace("_q.", f"_{x}.")) for x in "qkv"])
    return weights


def comfyui(state: Weights) -> Weights:
    """The weights of ComfyUI's network."""
    renamed = {}
    for name, weight in fused(state).items():
        for ours, theirs in (("attn_qkv", "attn.qkv"), ("attn_proj", "attn.proj"), ("mod.linear", "mod.lin")):
            name = name.replace(ours, theirs)
        embedder = re.match(r"(time(?:_r)?_in|txt_in\.[tc]_embedder)\.(?:mlp\.|linear_)(\d)(.*)", name)
        if embedder:
            name = (
                f"{embedder[1]}.{'in' if embedder[2] in '01' and 'linear_2' not in name else 'out'}_layer{embedder[3]}"
            )
        renamed[re.sub(r"mlp\.fc([12])", lambda match: f"mlp.{2 * int(match[1]) - 2}", name)] = weight
    return renamed


class Program(NamedTuple):
    """How a program names an adapter's tensors, and where it keeps alpha: beside them, in the metadata or a file."""

    weights: Callable[[Weights], Weights]
    prefix: str = ""
    down: str = "lora_A"
    up: str = "lora_B"
    alpha: str = "tensor"

    def key(self, module: str) -> str:
        return self.prefix + (module.replace(".", "_") if self.prefix.endswith("_") else module)


PROGRAMS = {
    "this project": Program(diffusers, alpha="lora_adapter_metadata"),
    "the original": Program(original_transformer_tensors, alpha="lora_adapter_metadata"),
    "a diffusers pipeline": Program(diffusers, "transformer.", alpha="lora_adapter_metadata"),
    "old diffusers": Program(diffusers, "", "lora.down", "lora.up"),
    "PEFT": Program(diffusers, "base_model.model.", alpha="adapter_config.json"),
    "PEFT on the original": Program(original_transformer_tensors, "base_model.model.", alpha="adapter_config.json"),
    "ComfyUI": Program(comfyui, "diffusion_model."),
    "diffusion-pipe": Program(fused, "transformer."),
    "kohya for ComfyUI": Program(comfyui, "lora_unet_", "lora_down", "lora_up"),
    "musubi-tuner": Program(original_transformer_tensors, "lora_unet_", "lora_down", "lora_up"),
    "OneTrainer": Program(diffusers, "lora_transformer_", "lora_down", "lora_up"),
}
OF_TENSORS = {name: program for name, program in PROGRAMS.items() if program.alpha == "tensor"}


class Layer(NamedTuple):
    """An adapter of one module of a program's network; an alpha of None is not written."""

    down: Tensor
    up: Tensor
    alpha: float | None = ALPHA

    @property
    def change(self) -> Tensor:
        rank = len(self.down)
        return (rank if self.alpha is None else self.alpha) / rank * self.up.double() @ self.down.double()


def layers_of(weights: Weights, ranks: tuple[int, ...] = (RANK,), alphas: tuple[float | None, ...] = (ALPHA,)):
    """Random adapters of all linear layers, whose ranks and alphas follow one another."""
    generator, layers = torch.Generator().manual_seed(1), {}
    for name, weight in weights.items():
        if weight.ndim == 2 and name.endswith(".weight") and "cond_type" not in name:
            number, (rows, columns) = len(layers), weight.shape
            rank = ranks[number % len(ranks)]
            down, up = (0.2 * torch.randn(shape, generator=generator) for shape in ((rank, columns), (rows, rank)))
            layers[name.removesuffix(".weight")] = Layer(down, up, alphas[number % len(alphas)])
    return layers


def write(program: Program, layers: dict[str, Layer], path: Path) -> Path:
    tensors, metadata = {}, {"format": "pt"}
    for module, layer in layers.items():
        key = program.key(module)
        tensors |= {f"{key}.{program.down}.weight": layer.down, f"{key}.{program.up}.weight": layer.up}
        if program.alpha == "tensor" and layer.alpha is not None:
            tensors[f"{key}.alpha"] = torch.tensor(layer.alpha)
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    if program.alpha == "adapter_config.json":
        (path.parent / program.alpha).write_text(json.dumps(settings))
    elif program.alpha != "tensor":
        prefix = "transformer." if program.prefix else ""
        metadata[program.alpha] = json.dumps({f"{prefix}{name}": value for name, value in settings.items()})
    save_file(tensors, path, metadata)
    return path


def output(transformer: HunyuanVideo15Transformer3DModel) -> Tensor:
    call = transformer_call((1, 2, 2), [5], [3], image=True)
    call = {name: x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for name, x in call.items()}
    with torch.no_grad():
        return transformer(**call)[0]


def merged(transformer: HunyuanVideo15Transformer3DModel) -> Weights:
    transformer.fuse_lora()
    transformer.unload_lora()
    return transformer.state_dict()


def error(received: Tensor, expected: Tensor) -> float:
    return float((received.double() - expected.double()).abs().max() / expected.double().abs().max())


def largest_error(program: Program, layers: dict[str, Layer], path: Path) -> float:
    """Load an adapter; returns the largest error of a weight's change, or of the output."""
    transformer = original_transformer("480p_i2v").requires_grad_(False)
    before = {name: tensor.double() for name, tensor in program.weights(transformer.state_dict()).items()}
    load_lora(transformer.double(), path)
    received = output(transformer)
    change = {name: tensor - before[name] for name, tensor in program.weights(merged(transformer)).items()}
    errors = [error(change[f"{module}.weight"], layer.change) for module, layer in layers.items()]
    assert not any(tensor.any() for name, tensor in change.items() if name.removesuffix(".weight") not in layers)
    return max(*errors, error(received, output(transformer)))


@pytest.fixture
def weights() -> Weights:
    return original_transformer("480p_i2v").state_dict()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_adapter_of_any_program_changes_weights_and_output_as_it_does_there(name, weights, tmp_path):
    program = PROGRAMS[name]
    layers = layers_of(program.weights(weights))
    received = largest_error(program, layers, write(program, layers, tmp_path / "mine.safetensors"))
    print(f"{name}: {received:.1e}")
    assert received < CLOSE
