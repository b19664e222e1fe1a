"""A checkpoint as HunyuanVideo-1.5's authors publish it is loaded exactly, or refused with what is wrong."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from safetensors.torch import load_file, save_file
from torch import nn

from hyvideo.models.loading import load_pipeline, load_transformer, load_vae
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from tests.support.equal_runs import assert_same
from tests.support.original_layout import GLYPH_VOCABULARY, VERSIONS, original_transformer
from tests.support.tiny_model import build_glyph_encoder, build_text_encoder, build_vae, build_vision_encoder

FILES = {
    "transformer": "transformer/480p_t2v/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "language model": "text_encoder/llm/model.safetensors",
}


def load(root: Path, version: str = "480p_t2v", **where: torch.device) -> HunyuanVideo15Pipeline:
    return load_pipeline(root, version, scheduler=FlowMatchDiscreteScheduler(), **where)


@pytest.fixture
def copy(original_root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original_root, tmp_path / "ckpts")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_the_weights_and_sizes_it_was_written_from(original_root, version):
    loaded, expected = load_transformer(original_root, version), original_transformer(version)
    assert_same(loaded.state_dict(), expected.state_dict())
    rounded = load_transformer(original_root, version, dtype=torch.bfloat16)
    assert_same(rounded.state_dict(), original_transformer(version).to(torch.bfloat16).state_dict())
    sizes = [name for name in expected.config if not name.startswith("_")]
    assert {name: loaded.config[name] for name in sizes} == {name: expected.config[name] for name in sizes}


def test_every_weight_is_put_where_it_belongs_as_it_is_read(original_root):
    meta = torch.device("meta")
    pipeline = load(original_root, device=meta, encoders_on=meta)
    networks = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    assert len(networks) == 4
    assert {weight.device for network in networks for weight in network.parameters()} == {meta}


def test_the_vae_has_its_weights_scale_and_tiles(original_root):
    vae = load_vae(original_root)
    assert_same(vae.state_dict(), build_vae().state_dict())
    assert vae.config.scaling_factor == 0.7
    assert not vae.use_tiling
    assert (vae.tile_sample_min_height, vae.tile_overlap_factor) == (256, 0.125)


def test_encoders_are_taken_from_where_the_authors_keep_them(original_root):
    pipeline = load(original_root)
    assert_same(pipeline.text_encoder.state_dict(), build_text_encoder(len(pipeline.tokenizer)).state_dict())
    assert_same(pipeline.text_encoder_2.state_dict(), build_glyph_encoder(vocab_size=GLYPH_VOCABULARY).state_dict())
    assert pipeline.text_encoder_2.shared.weight is pipeline.text_encoder_2.encoder.embed_tokens.weight
    assert pipeline.tokenizer_2.convert_tokens_to_ids(["<color-0>", "<en-font-0>", "<cn-font-1>"]) == [384, 387, 388]
    assert not any(p.requires_grad for p in pipeline.text_encoder.parameters())


@pytest.mark.parametrize("component", FILES)
def test_a_missing_weight_a_leftover_one_and_a_wrong_shape_are_named_as_the_file_names_them(copy, component):
    file = copy / FILES[component]
    tensors = load_file(file)
    gone, wrong = [name for name in sorted(tensors) if not name.startswith("lm_head")][:2]
    expected = list(tensors[wrong].shape)
    del tensors[gone]
    tensors |= {"double_blocks.9.left.over": torch.zeros(2), wrong: torch.zeros(7)}
    save_file(tensors, file, metadata={"format": "pt"})
    message = (
        f"missing keys: {gone}; unexpected keys: double_blocks.9.left.over; "
        f"mis-shaped keys: {wrong} (expected {expected}, received [7])"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load(copy)


def test_the_weight_that_tells_the_glyph_width_is_named_if_it_is_one_number(copy):
    tensors, name = load_file(copy / FILES["transformer"]), "byt5_in.layernorm.weight"
    save_file(tensors | {name: torch.tensor(1.0)}, copy / FILES["transformer"], metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} \(expected \[1472\], received \[\]\)"):
        load_transformer(copy, "480p_t2v")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_double_blocks_depth": 3}, r"missing keys: double_blocks\.2\.img_attn_k\.bias"),
        ({"mm_double_blocks_depth": 1}, r"unexpected keys: double_blocks\.1\.img_attn_k\.bias"),
        ({"use_meanflow": True}, r"missing keys: time_r_in\.mlp\.0\.bias"),
        ({"guidance_embed": True}, "guidance_embed is True, expected False"),
        ({"mm_single_blocks_depth": 2}, "mm_single_blocks_depth is 2, expected 0"),
        ({"ideal_resolution": "8k"}, "lacks or does not understand '8k'"),
        ({"patch_size": None}, "lacks or does not understand"),
    ],
)
def test_a_config_that_is_not_that_of_the_weights_is_refused(copy, changes, message):
    path = copy / "transformer" / "480p_t2v" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        load_transformer(copy, "480p_t2v")


def cut(length: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[:length])


SHARD = "transformer/480p_i2v/diffusion_pytorch_model-0000{}-of-00003.safetensors"
NO_JSON = ("llm/config.json", "byt5-small/config.json", "Glyph-SDXL-v2/assets/color_idx.json")
SIZES = "vision_encoder/siglip/feature_extractor/preprocessor_config.json"


def enlarge(path: Path) -> None:
    """Make an image processor return images that fill the memory."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": {"height": 2**11, "width": 2**11}}))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (SHARD.format(2), cut(-100), "Cannot read '{path}', {size:,} bytes"),
        (SHARD.format(3), Path.unlink, r"lacks diffusion_pytorch_model-00003-of-00003\.safetensors of the 3 files"),
        (SIZES, enlarge, "size is .*2048.*, but the vision model takes 16 by 16 pixels"),
        (SHARD.format(2), lambda path: shutil.copy(str(path).replace("00002", "00001"), path), "disagree about"),
        ("text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt", cut(200), "Cannot load tensors from '{path}'"),
        *((f"text_encoder/{file}", cut(1), f"Cannot (load|read) .*{file.rpartition('/')[0]}") for file in NO_JSON),
        ("text_encoder/byt5-small/tokenizer_config.json", cut(-10), "Cannot read '{path}'"),
    ],
)
def test_a_damaged_file_is_named(copy, file, damage, message):
    path = copy / file
    damage(path)
    size = path.stat().st_size if path.exists() else 0
    with pytest.raises(ValueError, match=message.format(path=path, size=size)):
        load(copy, "480p_i2v" if "i2v" in file or "vision" in file else "480p_t2v")


def test_the_vision_encoder_is_loaded_for_image_to_video_alone(original_root):
    seen = {}

    class Recorder:
        def __init__(self, **components: object) -> None:
            seen.update(components)

    load_pipeline(original_root, "480p_i2v", pipeline_class=Recorder, scheduler=None)
    assert_same(seen["image_encoder"].state_dict(), build_vision_encoder().state_dict())
    assert seen["feature_extractor"].size["height"] == 16
    assert "image_encoder" not in load(original_root).components
