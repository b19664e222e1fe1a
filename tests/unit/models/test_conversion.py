"""The key map between the two layouts: literal names of the published checkpoint, and exact in both directions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyvideo.models.conversion import (
    _VAE_SIZES,
    Part,
    diffusers_transformer_config,
    diffusers_vae_config,
    original_tensors,
    original_transformer_config,
    transformer_part,
    vae_part,
)
from tests.support.equal_runs import assert_same
from tests.support.original_layout import (
    VERSIONS,
    original_transformer,
    original_transformer_tensors,
    original_vae_tensors,
    transformer_config_json,
)
from tests.support.tiny_model import build_vae

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

PUBLISHED_VAE = {
    "decoder.up_blocks.0.resnets.2.norm1.gamma": "decoder.up.0.block.2.norm1.gamma",
    "decoder.up_blocks.4.resnets.0.conv_shortcut.weight": "decoder.up.4.block.0.nin_shortcut.weight",
}


def test_published_names_are_found_and_others_are_no_part_of_the_network():
    assert {name: transformer_part(name) for name in PUBLISHED} == PUBLISHED
    assert {name: vae_part(name).name for name in PUBLISHED_VAE} == PUBLISHED_VAE
    for name in ("transformer_blocks.0.attn.to_x.weight", "x_embedder", "extra.weight", ""):
        with pytest.raises(KeyError):
            transformer_part(name)


@pytest.mark.parametrize("version", VERSIONS)
def test_transformer_and_config_become_the_published_checkpoint_bit_for_bit_and_the_config_comes_back(version):
    transformer = original_transformer(version)
    config, state = transformer.config, transformer.state_dict()
    assert_same(dict(original_tensors(state)), original_transformer_tensors(state))
    original, published = original_transformer_config(config), transformer_config_json(config)
    assert {name: original[name] for name in published} == published
    back = diffusers_transformer_config(original, config["text_embed_2_dim"], "config.json")
    assert back == {name: config[name] for name in back}


def test_the_vae_becomes_the_published_checkpoint_bit_for_bit():
    state = build_vae().state_dict()
    assert_same({vae_part(name).name: tensor for name, tensor in state.items()}, original_vae_tensors(state))


def test_what_the_original_network_cannot_have_is_not_exported():
    transformer = original_transformer("480p_t2v")
    with pytest.raises(ValueError, match="target_size 64 and 2 refiner layers"):
        original_transformer_config({**transformer.config, "target_size": 64})
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
    config = dict.fromkeys(_VAE_SIZES, 1)
    assert diffusers_vae_config(config | {"shift_factor": 0.25}, "x")["shift_factor"] == 0.25
    assert "shift_factor" not in diffusers_vae_config(config | {"shift_factor": None}, "x")
    del config["ffactor_spatial"]
    with pytest.raises(ValueError, match="'x' lacks ffactor_spatial"):
        diffusers_vae_config(config, "x")
