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
from diffusers.loaders import HunyuanVideoLoraLoaderMixin
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from hyvideo.checkpoint.export import export_lora
from hyvideo.models.adapter import ADAPTER, ADAPTER_FILE, check_lora, load_lora, lora_config
from hyvideo.models.parallelize import prepare_policy
from tests.support.equal_runs import assert_same
from tests.support.original_layout import original_transformer, original_transformer_tensors
from tests.support.tiny_model import transformer_call

Weights = dict[str, Tensor]
RANK, ALPHA, CLOSE, TENSOR = 6, 9, 1e-6, "tensor"


def fused(state: Weights) -> Weights:
    """The weights of the original layout, with queries, keys and values in one, as diffusion-pipe names them."""
    weights = original_transformer_tensors(state)
    for name in [name for name in weights if "_attn_q.weight" in name]:
        weights[name.replace("_q.", "_qkv.")] = torch.cat([weights.pop(name.replace("_q.", f"_{x}.")) for x in "qkv"])
    return weights


COMFYUI = {"_attn_qkv": "_attn.qkv", "_attn_proj": "_attn.proj", "mod.linear": "mod.lin", "mlp.fc1": "mlp.0"}
COMFYUI |= {"mlp.fc2": "mlp.2", "c_embedder.linear_1": "c_embedder.in_layer"}
COMFYUI |= {"_embedder.linear_2": "_embedder.out_layer"}
COMFYUI |= {f"{x}.mlp.{n}.": f"{x}.{y}_layer." for x in ("_in", "t_embedder") for n, y in ((0, "in"), (2, "out"))}


def comfyui(state: Weights) -> Weights:
    """The weights of ComfyUI's network."""
    renamed = re.compile("|".join(map(re.escape, COMFYUI)))
    return {renamed.sub(lambda match: COMFYUI[match[0]], name): weight for name, weight in fused(state).items()}


class Program(NamedTuple):
    """How a program names an adapter's tensors, and where it keeps alpha: beside them, in the metadata or a file."""

    weights: Callable[[Weights], Weights]
    prefix: str = ""
    down: str = "lora_A"
    up: str = "lora_B"
    alpha: str = TENSOR

    def key(self, module: str) -> str:
        return self.prefix + (module.replace(".", "_") if self.prefix.endswith("_") else module)


original = original_transformer_tensors
PROGRAMS = {
    "this project": Program(dict, alpha="lora_adapter_metadata"),
    "the original": Program(original, alpha="lora_adapter_metadata"),
    "a diffusers pipeline": Program(dict, "transformer.", alpha="lora_adapter_metadata"),
    "old diffusers": Program(dict, "", "lora.down", "lora.up"),
    "diffusers with PEFT's settings": Program(dict, alpha="adapter_config.json"),
    "PEFT": Program(dict, "base_model.model.", alpha="adapter_config.json"),
    "PEFT on the original": Program(original, "base_model.model.", alpha="adapter_config.json"),
    "ComfyUI": Program(comfyui, "diffusion_model."),
    "diffusion-pipe": Program(fused, "transformer."),
    "kohya for ComfyUI": Program(comfyui, "lora_unet_", "lora_down", "lora_up"),
    "musubi-tuner": Program(original, "lora_unet_", "lora_down", "lora_up"),
    "OneTrainer": Program(dict, "lora_transformer_", "lora_down", "lora_up"),
}


Layers = dict[str, tuple[Tensor, Tensor, float | None]]
"""A, B and alpha of each module; None stands for an alpha that is not written, so that the scale is 1."""


def layers_of(weights: Weights, ranks=(RANK,), alphas=(ALPHA,)) -> Layers:
    """Random adapters of all linear layers, whose ranks and alphas follow one another."""
    generator, layers = torch.Generator().manual_seed(1), {}
    for name, weight in weights.items():
        if weight.ndim == 2 and "cond_type" not in name:
            rank, alpha = ranks[len(layers) % len(ranks)], alphas[len(layers) % len(alphas)]
            down, up = torch.randn(rank, weight.shape[1], generator=generator), torch.randn(len(weight), rank)
            layers[name.removesuffix(".weight")] = (0.2 * down, 0.2 * up, alpha)
    return layers


def write(program: Program, layers: Layers, path: Path) -> Path:
    tensors, metadata = {}, {"format": "pt"}
    for module, (down, up, alpha) in layers.items():
        key = program.key(module)
        tensors |= {f"{key}.{program.down}.weight": down, f"{key}.{program.up}.weight": up}
        if program.alpha == TENSOR and alpha is not None:
            tensors[f"{key}.alpha"] = torch.tensor(alpha)
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    if program.alpha == "adapter_config.json":
        (path.parent / program.alpha).write_text(json.dumps(settings))
    elif program.alpha != TENSOR:
        metadata[program.alpha] = json.dumps({f"{program.prefix}{name}": value for name, value in settings.items()})
    save_file(tensors, path, metadata)
    return path


def network() -> HunyuanVideo15Transformer3DModel:
    return original_transformer("480p_i2v").requires_grad_(False).double()


def output(transformer: HunyuanVideo15Transformer3DModel) -> Tensor:
    call = transformer_call((1, 2, 2), [5], [3], image=True)
    floats = {name: x.double() for name, x in call.items() if torch.is_tensor(x) and x.is_floating_point()}
    return transformer(**call | floats)[0]


def merged(transformer: HunyuanVideo15Transformer3DModel) -> Weights:
    transformer.fuse_lora()
    transformer.unload_lora()
    return transformer.state_dict()


def error(received: Tensor, expected: Tensor) -> float:
    return ((received - expected).abs().max() / expected.abs().max()).item()


def largest_error(program: Program, layers: Layers, path: Path) -> float:
    """Load an adapter; returns the largest error of a weight's change, or of the output."""
    transformer, before = network(), program.weights(network().state_dict())
    load_lora(transformer, path)
    received = output(transformer)
    change = {name: tensor - before[name] for name, tensor in program.weights(merged(transformer)).items()}
    errors = [error(received, output(transformer))]
    for module, (down, up, alpha) in layers.items():
        expected = (1 if alpha is None else alpha / len(down)) * up.double() @ down.double()
        errors.append(error(change.pop(f"{module}.weight"), expected))
    assert not any(tensor.any() for tensor in change.values())
    return max(errors)


SEVERAL = {"ranks": (4, 2, 3), "alphas": (8, None, 3.7, 1, -2.0)}


@pytest.mark.parametrize(
    ("name", "several"),
    [(name, {}) for name in PROGRAMS] + [(name, SEVERAL) for name in PROGRAMS if PROGRAMS[name].alpha == TENSOR],
)
def test_an_adapter_of_any_program_changes_weights_and_output_as_it_does_there(name, several, tmp_path):
    layers = layers_of(PROGRAMS[name].weights(network().state_dict()), **several)
    path = write(PROGRAMS[name], layers, tmp_path / "mine.safetensors")
    assert largest_error(PROGRAMS[name], layers, path) < CLOSE


CHOSEN = [((6, 2), (9, 3), (6, 9)), ((3,), (None,), (3, 3)), ((16,), (1.0,), (16, 1)), ((4,), (0.5,), (4, 4))]


@pytest.mark.parametrize(("ranks", "alphas", "expected"), [*CHOSEN, (*SEVERAL.values(), (4, 4))])
def test_an_adapter_gets_one_rank_and_one_alpha_with_which_training_continues(tmp_path, ranks, alphas, expected):
    weights = {name: weight for name, weight in network().state_dict().items() if "attn.to_q." in name}
    path = write(PROGRAMS["OneTrainer"], layers_of(weights, ranks, alphas), tmp_path / "mine.safetensors")
    for device in ("cpu", "meta"):
        policy, wanted = network().to(device), lora_config(*expected, ["to_q"])
        prepare_policy(policy, gradient_checkpointing=False, lora=wanted, pretrained_lora_path=str(path))
        assert {len(p) for name, p in policy.named_parameters() if "lora_A" in name} == {expected[0]}


@pytest.mark.parametrize("stabilised", [False, True])
def test_what_peft_and_diffusers_themselves_save_is_loaded_with_its_scale_and_not_without_it(tmp_path, stabilised):
    settings = {"r": 4, "lora_alpha": 6, "rank_pattern": {"to_k": 2}, "alpha_pattern": {"to_v": 1}}
    settings |= {"target_modules": ["to_q", "to_k", "to_v"], "init_lora_weights": False, "use_rslora": stabilised}
    model = get_peft_model(network(), LoraConfig(**settings))
    model.save_pretrained(tmp_path / "peft")
    layers = {name.removeprefix("base_model.model."): x for name, x in get_peft_model_state_dict(model).items()}
    note = {"transformer_lora_adapter_metadata": model.peft_config["default"].to_dict()}
    HunyuanVideoLoraLoaderMixin.save_lora_weights(tmp_path / "diffusers", layers, **note)
    expected = model.merge_and_unload().state_dict()
    for folder in ("peft", "diffusers"):
        received = network()
        load_lora(received, tmp_path / folder)
        assert max(error(tensor, expected[name]) for name, tensor in merged(received).items()) < CLOSE
    (tmp_path / "peft" / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match="named as in PEFT, .* its alpha stands in adapter_config.json, which is not"):
        load_lora(network(), tmp_path / "peft")


FORMS = {"lora": "this project", "lora_original": "the original"}
FORMS |= {"comfyui": "kohya for ComfyUI", "musubi": "musubi-tuner"}


@pytest.mark.parametrize("modules", [["all-linear"], ["to_q", "add_v_proj"]])
@pytest.mark.parametrize(("form", "program"), FORMS.items())
def test_our_adapter_does_elsewhere_what_it_does_here_and_comes_back_bit_for_bit(tmp_path, form, program, modules):
    transformer, back = network(), network()
    transformer.add_adapter(lora_config(RANK, ALPHA, modules), adapter_name=ADAPTER)
    for name, parameter in transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    export_lora(transformer, tmp_path / "out", form)
    load_lora(back, tmp_path / "out" / ADAPTER_FILE)
    assert_same(*(get_peft_model_state_dict(each, adapter_name=ADAPTER) for each in (back, transformer)))
    assert (back.peft_config[ADAPTER].r, back.peft_config[ADAPTER].lora_alpha) == (RANK, ALPHA)
    program, written = PROGRAMS[program], load_file(tmp_path / "out" / ADAPTER_FILE)
    expected, weights = (program.weights(state) for state in (merged(transformer), network().state_dict()))
    for name, weight in weights.items():
        key = program.key(name.removesuffix(".weight"))
        if f"{key}.{program.down}.weight" in written:
            down, up = (written.pop(f"{key}.{end}.weight") for end in (program.down, program.up))
            alpha = written.pop(f"{key}.alpha", ALPHA / RANK * len(down))
            weight = weight + alpha / len(down) * up @ down
        assert error(weight, expected[name]) < CLOSE
    assert not written


UNET, PART = "lora_unet_double_blocks_0_", "lora_unet_double_blocks_0_img_attn_q"
QKV = f"{PART}kv"
A, B, ALPHA_OF = f"{QKV}.lora_down.weight", f"{QKV}.lora_up.weight", f"{QKV}.alpha"
MISFITS = [
    ({"lora_te_encoder_layers_0_fc1.alpha": 1}, "lora_te_encoder.* of plain LoRA on the transformer; .* Remove it, or"),
    ({f"{UNET}img_mlp_0.hada_w1_a": 1}, f"{UNET}img_mlp_0.hada_w1_a is no matrix or alpha of plain LoRA"),
    ({"lora_unet_single_blocks_0_linear1.alpha": 1}, "_linear1.alpha is of a module .* names like lora_unet_.* Check"),
    ({B: None}, rf"{QKV} has torch.float32 \[4, 32\]; expected .* lora_B \[out, rank\]"),
    ({B: (64, 4)}, r"has matrices of \[4, 32\] and \[64, 4\]; expected \[rank, 32\] and \[96, rank\]"),
    ({B: (96, 3)}, r"has torch.float32 \[4, 32\] and torch.float32 \[96, 3\]; expected"),
    ({A: (0, 32), B: (96, 0)}, "of rank 1 to 8192"),
    ({A: (4,)}, "expected floating-point matrices"),
    ({B: torch.ones(96, 4, dtype=torch.int8)}, f"{QKV} has torch.float32 .* and torch.int8"),
    ({B: torch.full((96, 4), torch.nan)}, "values that are not finite"),
    ({ALPHA_OF: torch.tensor(torch.nan)}, r"alpha is \[nan\]; expected one number"),
    ({ALPHA_OF: torch.ones(2**16)}, r"alpha is \[1.0, 1.0, 1.0\]; expected one number"),
    ({ALPHA_OF: torch.tensor(0)}, "expected one number that is not 0"),
    ({f"{PART}.lora_A.weight": (4, 32), f"{PART}.lora_B.weight": (32, 4)}, "attn.to_q, which another of its names"),
    ({f"{QKV}.lora_B.weight": (96, 4)}, "stands beside the same tensor"),
    ({A: (512, 32), B: (96, 512)}, "its ranks go up to 512, .* times its memory"),
]


@pytest.mark.parametrize(("changed", "said"), MISFITS)
def test_what_does_not_fit_is_refused_with_its_naming_its_key_and_what_to_do(tmp_path, changed, said):
    layers = layers_of(comfyui(network().state_dict()), ranks=(4,))
    path = write(PROGRAMS["kohya for ComfyUI"], layers, tmp_path / "mine.safetensors")
    changed = {name: torch.ones(t) if isinstance(t, tuple | int) else t for name, t in changed.items()}
    save_file({name: t for name, t in (load_file(path) | changed).items() if t is not None}, path)
    with pytest.raises(ValueError, match=f"'{path}', named as in kohya or musubi-tuner, does not fit .*{said}"):
        load_lora(network(), path)


def test_a_file_that_is_not_there_or_not_whole_is_named_before_a_model_is_read(tmp_path):
    with pytest.raises(ValueError, match=f"lora path: there is nothing at '{tmp_path}/mine.safetensors'"):
        check_lora(tmp_path / "mine.safetensors")
    path = write(PROGRAMS["musubi-tuner"], layers_of(original(network().state_dict())), tmp_path / "mine.safetensors")
    assert check_lora(path) == path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"'{path}' is no whole safetensors file: .* Download it again"):
        check_lora(path)


@pytest.mark.parametrize(
    ("setting", "said"),
    [({"lora_alpha": 0}, "an adapter with alpha 0 changes nothing"), ({"use_dora": True}, "it sets use_dora")],
)
def test_settings_of_another_kind_of_adapter_are_refused(tmp_path, setting, said):
    path = write(PROGRAMS["PEFT"], layers_of(network().state_dict()), tmp_path / "mine.safetensors")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | setting))
    with pytest.raises(ValueError, match=said):
        load_lora(network(), path)
