"""Adapters with original names: the same change of the weights, and exact in both directions."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from hyvideo.config.schema import Config
from hyvideo.models.adapter import ADAPTER, load_lora, lora_config
from hyvideo.models.conversion import original_tensors
from hyvideo.models.lora_keys import adapter_to_diffusers, adapter_to_original, has_original_keys
from tests.support.equal_runs import assert_same
from tests.support.original_layout import original_transformer
from tests.support.tiny_model import build_transformer

RANK, ALPHA = 4, 6
MODULES = (
    "double_blocks.1.img_attn_q",
    "double_blocks.0.txt_mlp.fc1",
    "txt_in.individual_token_refiner.blocks.1.self_attn_qkv",
    "final_layer.adaLN_modulation.1",
    "final_layer.linear",
)


@pytest.fixture
def transformer() -> HunyuanVideo15Transformer3DModel:
    return original_transformer("480p_t2v")


@pytest.fixture
def adapter(transformer) -> dict[str, Tensor]:
    weights = dict(original_tensors(transformer.state_dict()))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for module in MODULES:
        rows, columns = weights[f"{module}.weight"].shape
        tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
        tensors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    return tensors


def write_adapter(folder: Path, tensors: dict[str, Tensor], **settings: object) -> Path:
    note = json.dumps({"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"} | settings)
    save_file(tensors, folder / "pytorch_lora_weights.safetensors", metadata={"lora_adapter_metadata": note})
    return folder


def product(adapter: dict[str, Tensor], module: str) -> Tensor:
    return adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]


def test_the_original_weights_change_by_scaled_b_times_a(transformer, adapter, tmp_path):
    expected = {name: tensor.clone() for name, tensor in original_tensors(transformer.state_dict())}
    for module in MODULES:
        expected[f"{module}.weight"] += ALPHA / RANK * product(adapter, module)
    load_lora(transformer, write_adapter(tmp_path, adapter))
    transformer.fuse_lora()
    transformer.unload_lora()
    received = dict(original_tensors(transformer.state_dict()))
    assert received.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(received[name], tensor, rtol=1e-5, atol=1e-5)


def test_without_settings_alpha_is_the_rank(transformer, adapter, tmp_path):
    save_file(adapter, tmp_path / "pytorch_lora_weights.safetensors")
    load_lora(transformer, tmp_path)
    assert {m.scaling[ADAPTER] for m in transformer.modules() if getattr(m, "scaling", None)} == {1.0}


@pytest.fixture
def our_adapter(transformer) -> tuple[dict[str, Tensor], dict]:
    """An adapter as a run has it after updates: on the modules of the schema's default."""
    transformer.add_adapter(lora_config(RANK, ALPHA, Config().model.lora_target_modules), adapter_name=ADAPTER)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=generator)
    tensors = {n: t.detach().clone() for n, t in get_peft_model_state_dict(transformer, adapter_name=ADAPTER).items()}
    return tensors, transformer.peft_config[ADAPTER].to_dict()


def test_our_adapter_comes_back_bit_for_bit_from_original_keys_and_needs_all_parts_of_a_fused_module(our_adapter):
    tensors, settings = our_adapter
    original, original_settings = adapter_to_original(tensors, settings)
    assert has_original_keys(original)
    assert not has_original_keys(tensors)
    base = original_transformer("480p_t2v").state_dict()
    back, back_settings = adapter_to_diffusers(original, original_settings, base)
    assert_same(back, tensors)
    assert (back_settings["r"], back_settings["lora_alpha"]) == (RANK, ALPHA)
    assert back_settings["rank_pattern"] == back_settings["alpha_pattern"] == {}
    name = "context_embedder.token_refiner.refiner_blocks.0.attn.to_k"
    partial = {key: tensor for key, tensor in tensors.items() if not key.startswith(name)}
    with pytest.raises(ValueError, match="needs all 3 of query, key and value"):
        adapter_to_original(partial, settings)


def test_an_adapter_of_original_keys_comes_back_as_the_same_function(transformer, adapter):
    renamed, settings = adapter_to_diffusers(adapter, {"r": RANK, "lora_alpha": ALPHA}, transformer.state_dict())
    back, _ = adapter_to_original(renamed, settings)
    for module in MODULES:
        torch.testing.assert_close(product(back, module), product(adapter, module), rtol=1e-5, atol=1e-5)


ZEROS = torch.zeros(4, 32)
OTHER = {"double_blocks.9.img_attn_q.lora_A.weight": ZEROS, "double_blocks.9.img_attn_q.lora_B.weight": ZEROS.T}


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        (OTHER, {}, r"modules this transformer lacks: double_blocks\.9\.img_attn_q"),
        ({f"{MODULES[0]}.lora_B.weight": None}, {}, "see double_blocks.1.img_attn_q.lora_B"),
        ({f"{MODULES[0]}.lora_A.weight": torch.zeros(4, 7)}, {}, "does not fit this transformer"),
        ({}, {"use_dora": True}, "it sets use_dora"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(transformer, adapter, tmp_path, changed, settings, message):
    adapter = {name: tensor.contiguous() for name, tensor in (adapter | changed).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        load_lora(transformer, write_adapter(tmp_path, adapter, **settings))


@pytest.mark.parametrize(
    ("target", "chosen"),
    [
        ("img_attn_q", ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q"]),
        ("double_blocks.1.img_mlp.fc1", ["transformer_blocks.1.ff.net.0.proj"]),
        ("self_attn_qkv", [f"context_embedder.token_refiner.refiner_blocks.0.attn.to_{part}" for part in "kqv"]),
        ("byt5_in.fc2", ["context_embedder_2.linear_2"]),
    ],
)
def test_modules_are_chosen_by_the_originals_names_and_by_ours_together(target, chosen):
    linear = [name for name, module in build_transformer().named_modules() if isinstance(module, torch.nn.Linear)]
    both = lora_config(2, 4, [target, "ff_context.net.2"])
    found = [name for name in linear if check_target_module_exists(both, name)]
    blocks = [name for name in linear if name.endswith("ff_context.net.2")]
    assert blocks and sorted(found) == sorted([*chosen, *blocks])
    ours = lora_config(2, 4, ["to_q"])
    assert ours.target_modules == {"to_q"}
