"""Adapters and names of weights: exact in both layouts and directions, and refused where they do not fit."""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors import safe_open
from safetensors.torch import save_file

from hyvideo.models import adapter as adapters
from hyvideo.models import conversion
from hyvideo.models.adapter import ADAPTER_FILE, load_lora, lora_config, save_lora
from hyvideo.models.conversion import Part, original_tensors, transformer_part, vae_part
from hyvideo.models.parallelize import prepare_policy
from tests.support import original_layout
from tests.support.equal_runs import assert_same
from tests.support.tiny_model import ADAPTER, build_transformer
from tests.support.training import collect_round, weights_of

REFINER = "txt_in.individual_token_refiner.blocks.1"
OURS = "context_embedder.token_refiner.refiner_blocks.1"

PUBLISHED = {
    "transformer_blocks.53.norm1_context.linear.weight": Part("double_blocks.53.txt_mod.linear.weight"),
    "transformer_blocks.7.attn.norm_added_q.weight": Part("double_blocks.7.txt_attn_q_norm.weight"),
    "context_embedder_2.linear_3.weight": Part("byt5_in.fc3.weight"),
    f"{OURS}.attn.to_k.weight": Part(f"{REFINER}.self_attn_qkv.weight", 1, 3),
    f"{OURS}.attn.to_v.bias": Part(f"{REFINER}.self_attn_qkv.bias", 2, 3),
    "norm_out.linear.bias": Part("final_layer.adaLN_modulation.1.bias", swapped=True),
}
"""Names of the real model, whose numbers have more digits than those of the tiny one."""


def test_published_names_are_found_and_others_are_no_part_of_the_network():
    assert {name: transformer_part(name) for name in PUBLISHED} == PUBLISHED
    assert vae_part("decoder.up_blocks.0.resnets.2.norm1.gamma").name == "decoder.up.0.block.2.norm1.gamma"
    shortcut = vae_part("decoder.up_blocks.4.resnets.0.conv_shortcut.weight")
    assert shortcut.name == "decoder.up.4.block.0.nin_shortcut.weight"
    for name in ("transformer_blocks.0.attn.to_x.weight", "x_embedder", "extra.weight", ""):
        with pytest.raises(KeyError):
            transformer_part(name)


@pytest.mark.parametrize("version", original_layout.VERSIONS)
def test_transformer_and_config_become_the_published_checkpoint_bit_for_bit_and_the_config_comes_back(version):
    transformer = original_layout.original_transformer(version)
    config, state = transformer.config, transformer.state_dict()
    assert_same(dict(original_tensors(state)), original_layout.original_transformer_tensors(state))
    original = conversion.original_transformer_config(config)
    published = original_layout.transformer_config_json(config)
    assert {name: original[name] for name in published} == published
    back = conversion.diffusers_transformer_config(original, config["text_embed_2_dim"], "config.json")
    assert back == {name: config[name] for name in back}


def test_what_the_original_network_cannot_have_is_not_exported():
    transformer = original_layout.original_transformer("480p_t2v")
    with pytest.raises(ValueError, match="target_size 64 and 2 refiner layers"):
        conversion.original_transformer_config({**transformer.config, "target_size": 64})
    state = transformer.state_dict()
    del state["context_embedder.token_refiner.refiner_blocks.0.attn.to_k.bias"]
    with pytest.raises(ValueError, match=r"lack pieces: txt_in\.individual_.*\.blocks\.0\.self_attn_qkv\.bias"):
        dict(original_tensors(state))


@given(st.sampled_from([Part("x"), Part("x", 0, 3), Part("x", 2, 3), Part("x", swapped=True)]), st.data())
def test_any_rows_of_a_part_are_found_in_the_file(part, data):
    size = 2 * data.draw(st.integers(1, 8))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    file = torch.arange(size * part.count)
    whole = file.roll(size // 2) if part.swapped else file.chunk(part.count)[part.index]
    pieces = [file[first:last] for first, last in part.rows(start, stop, size)]
    assert torch.equal(torch.cat(pieces) if pieces else file[:0], whole[start:stop])


def test_a_shift_of_the_latents_is_kept_and_a_missing_setting_named():
    config = dict.fromkeys(conversion._VAE_SIZES, 1)
    assert conversion.diffusers_vae_config(config | {"shift_factor": 0.25}, "x")["shift_factor"] == 0.25
    assert "shift_factor" not in conversion.diffusers_vae_config(config | {"shift_factor": None}, "x")
    del config["ffactor_spatial"]
    with pytest.raises(ValueError, match="'x' lacks ffactor_spatial"):
        conversion.diffusers_vae_config(config, "x")


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
    assert lora_config(2, 4, ["to_q"]).target_modules == {"to_q"}


@pytest.fixture
def policy() -> HunyuanVideo15Transformer3DModel:
    return build_transformer()


@pytest.fixture(params=["cpu", "meta"])
def either(request: pytest.FixtureRequest) -> HunyuanVideo15Transformer3DModel:
    """A network, with memory or before it has any, as a run prepares it."""
    with torch.device(request.param):
        return build_transformer()


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(folder / ADAPTER_FILE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def save(network: HunyuanVideo15Transformer3DModel, folder: Path, lora: LoraConfig = ADAPTER) -> None:
    prepare_policy(network, gradient_checkpointing=False, lora=lora)
    save_lora(network, folder)
    network.delete_adapters("default")


def test_weights_given_apart_are_saved_as_those_inside(policy, tmp_path):
    prepare_policy(policy, gradient_checkpointing=False, lora=ADAPTER)
    save_lora(policy, tmp_path / "inside")
    save_lora(policy, tmp_path / "apart", adapters.adapter_weights(policy))
    (inside, note), (apart, other_note) = read(tmp_path / "inside"), read(tmp_path / "apart")
    assert_same(apart, inside)
    assert other_note == note


@pytest.mark.parametrize("change", [{"num_attention_heads": 4}, {"num_layers": 3}])
def test_an_adapter_of_another_model_is_refused(either, tmp_path, change):
    save(build_transformer(**change), tmp_path)
    with pytest.raises(ValueError, match="does not fit this transformer"):
        load_lora(either, tmp_path)


def test_memory_that_is_full_is_not_said_to_be_an_adapter_that_does_not_fit(policy, tmp_path, monkeypatch):
    save(policy, tmp_path)
    fails = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(HunyuanVideo15Transformer3DModel, "load_lora_adapter", fails)
    with pytest.raises(torch.OutOfMemoryError):
        load_lora(policy, tmp_path)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (lora_config(8, 4, ["to_q", "to_k"]), "lora_r is 8, the adapter has 2"),
        (lora_config(2, 8, ["to_q", "to_k"]), "lora_alpha is 8, the adapter has 4"),
        (lora_config(2, 4, ["to_q"]), r"lora_target_modules chooses 3 modules, the adapter has 6, .*to_k"),
    ],
)
def test_an_adapter_with_other_settings_than_the_runs_is_refused(policy, tmp_path, wanted, message):
    save(policy, tmp_path, lora_config(2, 4, ["to_q", "to_k"]))
    with pytest.raises(ValueError, match=message):
        prepare_policy(policy, gradient_checkpointing=False, lora=wanted, pretrained_lora_path=str(tmp_path))
    for absurd in (10**400, -(2**64)):
        with pytest.raises(ValueError, match="the alpha of an adapter is .*, expected less than"):
            lora_config(4, absurd, ["to_q"])


@pytest.mark.parametrize("names", [["transformer_blocks.0.attn.to_q.lora_A.weight"], ["weight"], []])
def test_an_adapter_that_is_named_in_another_way_is_told_what_is_expected(policy, tmp_path, names):
    save_file({name: torch.ones(2, 32) for name in names}, tmp_path / ADAPTER_FILE)
    held = ", ".join(sorted(names)) or "no tensors"
    with pytest.raises(ValueError, match=f"it holds {held}; expected matrices <module>.lora_A.weight and"):
        load_lora(policy, tmp_path)
    (tmp_path / ADAPTER_FILE).rename(tmp_path / "mine.safetensors")
    with pytest.raises(ValueError, match=r"no adapter at .*Name the folder that holds one, or .*\(mine.safetensors is"):
        load_lora(policy, tmp_path)


@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_an_adapter_that_is_missing_or_not_whole_is_refused(either, policy, tmp_path, matrix):
    with pytest.raises(ValueError, match=f"no adapter at '{tmp_path}"):
        load_lora(either, tmp_path)
    save(policy, tmp_path)
    tensors, note = read(tmp_path)
    gone = next(name for name in tensors if matrix in name)
    del tensors[gone]
    save_file(tensors, tmp_path / ADAPTER_FILE, note)
    with pytest.raises(ValueError, match=rf"is not whole: it lacks {re.escape(gone)} \(1 weights in all\)"):
        load_lora(either, tmp_path)


def test_a_fresh_adapter_has_the_librarys_distribution_and_depends_on_the_seed_alone():
    def drawn(seed: int) -> dict[str, torch.Tensor]:
        """The first values of an adapter whose network has no memory."""
        with torch.device("meta"):
            empty = build_transformer()
        prepare_policy(empty, gradient_checkpointing=False, lora=ADAPTER)
        torch.rand(seed)  # whatever was drawn before
        adapters.draw_adapter(empty, seed)
        return adapters.adapter_weights(empty)

    received, again, other = drawn(3), drawn(3), drawn(4)
    torch.manual_seed(0)
    librarys = adapters.adapter_weights(prepare_policy(build_transformer(), gradient_checkpointing=False, lora=ADAPTER))
    assert received.keys() == librarys.keys()
    first = [name for name in received if "lora_A" in name]
    assert 2 * len(first) == len(received)
    assert_same(again, received)
    for name, value in received.items():
        assert value.shape == librarys[name].shape
        assert torch.equal(value, other[name]) == (name not in first)
    spreads = [torch.cat([each[name].flatten() for name in first]).std().item() for each in (received, librarys)]
    assert spreads[0] == pytest.approx(spreads[1], rel=0.03)
    assert all(received[name].abs().max() <= received[name].shape[1] ** -0.5 for name in first)
    assert len({tuple(received[name].flatten()[:4].tolist()) for name in first}) == len(first)


@pytest.mark.parametrize("change", [{}, {"num_layers": 3, "use_meanflow": True}], ids=["tiny", "deeper, two timesteps"])
def test_with_all_linear_every_linear_layer_but_the_last_has_an_adapter(change: dict):
    network = build_transformer(**change)
    plain = {name for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)}
    prepare_policy(network, gradient_checkpointing=False, lora=lora_config(2, 4, ["all-linear"]))
    assert {name for name, module in network.named_modules() if isinstance(module, LoraLayer)} == plain - {"proj_out"}


def test_a_run_trains_and_resumes_with_all_linear(make_training, trained):
    settings = {"use_lora": True, "lora_target_modules": "all-linear", "max_steps": 2, "save_interval": 1}
    training = make_training(**settings)
    before = weights_of(training)
    training.train()
    changed = [name for name, value in weights_of(training).items() if not value.equal(before[name])]
    assert all(any(one in name for name in changed) for one in ("norm1.linear", "context_embedder.proj_in"))
    again = trained(**settings, resume_from_checkpoint=training.folder.checkpoints / "step_1")
    assert all(value.equal(weights_of(training)[name]) for name, value in weights_of(again).items())
    assert len(collect_round(again)) == 4
