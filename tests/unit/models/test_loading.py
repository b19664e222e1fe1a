"""Either layout is loaded exactly; what is missing, damaged or of another model is refused by name."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file, save_file

from hyvideo.models import model_folder
from hyvideo.models.loading import load_pipeline, load_transformer, load_vae
from hyvideo.models.reward_models.clip import ClipScore
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.models.reward_models.videoalign import VideoAlignReward
from hyvideo.models.reward_models.vlm_checks import VlmChecks
from hyvideo.models.weight_files import fingerprint
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from tests.support import tiny_model
from tests.support.equal_runs import assert_same
from tests.support.original_layout import GLYPH_VOCABULARY, VERSIONS, original_transformer

NETWORKS = ("transformer", "vae", "text_encoder", "text_encoder_2")
VERSION = "480p_t2v"
T2V = "transformer/480p_t2v/diffusion_pytorch_model.safetensors"


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Copies `tiny_root` or `original_root`, to be damaged."""
    return lambda layout: shutil.copytree(request.getfixturevalue(layout), tmp_path / "copy")


def load(root: Path, version: str | None = VERSION, **where: torch.dtype | torch.device | None) -> Any:
    return load_pipeline(root, version, scheduler=FlowMatchDiscreteScheduler(), **where)


def test_the_weights_are_those_of_the_stock_loader(tiny_root):
    ours, stock = load(tiny_root), HunyuanVideo15Pipeline.from_pretrained(tiny_root)
    assert type(ours.transformer) is HunyuanVideo15Transformer3DModel
    for component in NETWORKS:
        assert_same(getattr(ours, component).state_dict(), getattr(stock, component).state_dict())


@pytest.mark.parametrize("layout", ["tiny_root", "original_root"])
def test_every_weight_is_put_where_it_belongs_as_it_is_read(layout, request):
    """Told by the meta device, since a weight that was put there could not have been moved back."""
    meta = torch.device("meta")
    for encoders_on in (None, meta):
        pipeline = load(request.getfixturevalue(layout), device=meta, encoders_on=encoders_on)
        places = {name: {p.device for p in getattr(pipeline, name).parameters()} for name in NETWORKS}
        expected = {name: {meta} for name in NETWORKS[:2]}
        assert places == expected | dict.fromkeys(NETWORKS[2:], {encoders_on or torch.device("cpu")})


def test_dtypes_are_those_asked_for_encoders_and_vae_are_frozen_and_guidance_settings_optional(copied):
    root = copied("tiny_root")
    shutil.rmtree(root / "guider")
    pipeline = load(root, transformer_dtype=torch.bfloat16, encoder_dtype=torch.float16)
    dtypes = {name: {p.dtype for p in getattr(pipeline, name).parameters()} for name in NETWORKS}
    float16 = {name: {torch.float16} for name in ("vae", "text_encoder")}
    assert dtypes == {"transformer": {torch.bfloat16}, "text_encoder_2": {torch.float32}} | float16
    for component in (getattr(pipeline, name) for name in NETWORKS[1:]):
        assert not component.training and not any(p.requires_grad for p in component.parameters())
    assert pipeline.guider.guidance_scale == 7.5  # the class's own default


@pytest.mark.parametrize("file", [*NETWORKS, T2V, "vae/diffusion_*.safetensors", "text_encoder/llm/model.safetensors"])
def test_a_missing_weight_a_leftover_one_and_a_wrong_shape_are_named_as_the_file_names_them(copied, file):
    root = copied("tiny_root" if file in NETWORKS else "original_root")
    (path,) = root.glob(f"{file}/*.safetensors" if file in NETWORKS else file)
    weights = load_file(path)
    gone, wrong = [name for name in sorted(weights) if not name.startswith("lm_head")][:2]
    expected = list(weights.pop(wrong).shape)
    del weights[gone]
    save_file(weights | {"left.over": torch.zeros(2), wrong: torch.zeros(7)}, path, metadata={"format": "pt"})
    message = f"missing keys: {gone}; unexpected keys: left.over; mis-shaped keys: {wrong} "
    message += f"(expected {expected}, received [7])"
    with pytest.raises(ValueError, match=f"{file if file in NETWORKS else ''}.*{re.escape(message)}"):
        load(root)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_the_weights_and_sizes_it_was_written_from(original_root, version):
    loaded, expected = load_transformer(original_root, version), original_transformer(version)
    assert_same(loaded.state_dict(), expected.state_dict())
    rounded = load_transformer(original_root, version, dtype=torch.bfloat16)
    assert_same(rounded.state_dict(), original_transformer(version).to(torch.bfloat16).state_dict())
    sizes = [name for name in expected.config if not name.startswith("_")]
    assert {name: loaded.config[name] for name in sizes} == {name: expected.config[name] for name in sizes}


def test_the_other_networks_are_taken_from_where_the_authors_keep_them(original_root):
    pipeline, vae = load(original_root), load_vae(original_root)
    assert_same(vae.state_dict(), tiny_model.build_vae().state_dict())
    assert vae.config.scaling_factor == 0.7
    assert (vae.use_tiling, vae.tile_sample_min_height, vae.tile_overlap_factor) == (False, 256, 0.125)
    glyph, language = pipeline.text_encoder_2, pipeline.text_encoder
    assert_same(language.state_dict(), tiny_model.build_text_encoder(len(pipeline.tokenizer)).state_dict())
    assert_same(glyph.state_dict(), tiny_model.build_glyph_encoder(vocab_size=GLYPH_VOCABULARY).state_dict())
    assert glyph.shared.weight is glyph.encoder.embed_tokens.weight
    assert pipeline.tokenizer_2.convert_tokens_to_ids(["<color-0>", "<en-font-0>", "<cn-font-1>"]) == [384, 387, 388]
    assert not any(p.requires_grad for p in language.parameters())
    assert "image_encoder" not in pipeline.components
    of_images = load_pipeline(original_root, "480p_i2v", pipeline_class=SimpleNamespace, scheduler=None)
    assert_same(of_images.image_encoder.state_dict(), tiny_model.build_vision_encoder().state_dict())
    assert of_images.feature_extractor.size["height"] == 16


ABSURD = "{} is .*, expected less than"
CONFIGS = [
    ("transformer", {"num_layers": 3}, r"missing keys: transformer_blocks\.2"),
    ("transformer", {"num_layers": 10**9}, ABSURD),
    ("transformer", {"text_embed_dim": 10**9}, ABSURD),
    ("transformer", {"mlp_ratio": 1e30}, ABSURD),
    ("transformer", {"rope_theta": float("nan")}, ABSURD),
    ("vae", {"block_out_channels": [2**40]}, ABSURD),
    ("text_encoder", {"num_hidden_layers": 10**9}, ABSURD),
    ("text_encoder", {"rope_parameters": {"rope_theta": 1e30}}, ABSURD.format("rope_theta")),
    ("text_encoder", {"hidden_size": 2**12}, r"mis-shaped keys: embed_tokens\.weight"),
    ("text_encoder_2", {"vocab_size": 2**20 - 1}, r"mis-shaped keys: .*shared\.weight"),
]
ORIGINAL_CONFIGS = [
    ({"mm_double_blocks_depth": 3}, r"missing keys: double_blocks\.2\.img_attn_k\.bias"),
    ({"mm_double_blocks_depth": 1}, r"unexpected keys: double_blocks\.1\.img_attn_k\.bias"),
    ({"use_meanflow": True}, r"missing keys: time_r_in\.mlp\.0\.bias"),
    ({"guidance_embed": True}, "guidance_embed is True, expected False"),
    ({"mm_single_blocks_depth": 2}, "mm_single_blocks_depth is 2, expected 0"),
    ({"ideal_resolution": "8k"}, "lacks or does not understand: '8k'"),
    ({"patch_size": None}, "lacks or does not understand"),
]
SHARD = "transformer/480p_i2v/diffusion_pytorch_model-0000{}-of-00003.safetensors"
NO_JSON = ("llm/config.json", "byt5-small/config.json", "Glyph-SDXL-v2/assets/color_idx.json")
IMAGES = "vision_encoder/siglip/feature_extractor/preprocessor_config.json"
TOO_LARGE = {"size": {"height": 2**11, "width": 2**11}}
"""Images that fill the memory."""


WIDTH = "byt5_in.layernorm.weight"  # tells the width of the glyph encoder
DAMAGES = [
    *((f"{of}/config.json", new, f"{of}.*{said.format(*new)}") for of, new, said in CONFIGS),
    *((f"{name}/*.safetensors", -10, f"Cannot (read|load) .*{name}") for name in NETWORKS),
    *((f, -10, f"Cannot (read|load) .*{f}") for f in ("tokenizer/tokenizer.json", "tokenizer_2/tokenizer_config.json")),
]
ORIGINAL_DAMAGES = [
    (
        T2V,
        lambda path: save_file(load_file(path) | {WIDTH: torch.tensor(1.0)}, path),
        rf"{WIDTH} \(expected \[1472\], received \[\]\)",
    ),
    *(("transformer/480p_t2v/config.json", new, said) for new, said in ORIGINAL_CONFIGS),
    (SHARD.format(2), -100, "Cannot read '{path}', {size:,} bytes"),
    (SHARD.format(3), Path.unlink, f"lacks {Path(SHARD.format(3)).name} of the 3 files"),
    (SHARD.format(2), lambda path: shutil.copy(str(path).replace("00002", "00001"), path), "disagree about"),
    (IMAGES, TOO_LARGE, "size is .*2048.*, but the vision model takes 16 by 16 pixels"),
    ("text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt", 200, "Cannot load tensors from '{path}'"),
    *((f"text_encoder/{file}", 1, f"Cannot (load|read) .*{Path(file).parent}") for file in NO_JSON),
    ("text_encoder/byt5-small/tokenizer_config.json", -10, "Cannot read '{path}'"),
]


@pytest.mark.parametrize(
    ("layout", "damage"),
    [*(("tiny_root", each) for each in DAMAGES), *(("original_root", each) for each in ORIGINAL_DAMAGES)],
)
def test_a_damaged_file_and_a_config_of_another_network_or_of_absurd_sizes_are_named(copied, layout, damage):
    root, (file, change, message) = copied(layout), damage
    (path,) = root.glob(file)
    if isinstance(change, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    elif isinstance(change, int):  # the first bytes are left
        path.write_bytes(path.read_bytes()[:change])
    else:
        change(path)
    size = path.stat().st_size if path.exists() else 0
    with pytest.raises(ValueError, match=message.replace("{path}", str(path)).replace("{size:,}", f"{size:,}")):
        load(root, "480p_i2v" if "i2v" in file or "vision" in file else VERSION)


def test_all_missing_components_are_named_at_once_with_the_way_to_get_them(tiny_root, tmp_path):
    copied_root = shutil.copytree(tiny_root, tmp_path / "copy")
    shutil.rmtree(copied_root / "vae")
    for file in (copied_root / "tokenizer_2").iterdir():  # an empty folder is missing, too
        file.unlink()
    with pytest.raises(ValueError, match=rf"'{copied_root}' lacks vae, tokenizer_2;") as error:
        model_folder.check_layout(copied_root, VERSION)
    assert model_folder.HOW_TO_GET in str(error.value)
    with pytest.raises(ValueError, match=f"lacks {', '.join(model_folder.DIFFUSERS_COMPONENTS)};"):
        model_folder.check_diffusers_layout(tmp_path)


@pytest.mark.parametrize("root", ["absent", "."])
def test_a_folder_without_any_model_lists_the_commands_that_fetch_the_published_layout(tmp_path, root):
    with pytest.raises(ValueError, match="missing for version 720p_i2v") as error:
        model_folder.check_layout(tmp_path / root, "720p_i2v")
    message = str(error.value)
    absent = f"there is no folder '{tmp_path / root}' on this machine, and names on the"
    assert (root == "absent") == (absent in message)
    for folder in model_folder.original_files("720p_i2v"):
        assert model_folder.download_command(tmp_path / root, folder) in message
    assert "siglip" in message
    assert message.endswith("python post_train.py --config configs/tiny.yaml configs/demo.yaml")


def test_a_name_of_the_hub_is_no_folder_and_of_its_cache_the_snapshot_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no folder 'org/name' on this machine, .*download_weights.sh"):
        model_folder.transformer_folder("org/name", None)
    root = tmp_path / "models--org--name"
    snapshot = root / "snapshots" / "5ab1"
    snapshot.mkdir(parents=True)
    context = RewardContext(prompt_csvs=["a.csv"])
    for read in (
        lambda: model_folder.check_layout(root, None),
        lambda: model_folder.transformer_folder(root, None),
        lambda: model_folder.task_of(root, None),
        lambda: ClipScore.check(context, str(root)),
        lambda: VlmChecks.check(context, checkpoint=str(root)),
        lambda: VideoAlignReward.check(context, str(root)),
    ):
        with pytest.raises(ValueError, match=f"is a folder of the Hub's cache. Name .* with the files: '{snapshot}'"):
            read()


def test_only_what_is_missing_of_the_published_layout_is_listed(tmp_path):
    for folder, patterns in model_folder.original_files(VERSION).items():
        for pattern in patterns:
            path = tmp_path / folder / pattern.replace("*", "model")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    (tmp_path / "vae" / "config.json").unlink()
    with pytest.raises(ValueError, match=rf"missing[^\n]*\n  {tmp_path / 'vae'}: config.json\n") as error:
        model_folder.check_layout(tmp_path, VERSION)
    assert "text_encoder" not in str(error.value) and "siglip" not in str(error.value)


def test_both_layouts_are_accepted_and_tell_what_a_transformer_is_made_for(tiny_root, original_root):
    assert model_folder.is_diffusers_layout(tiny_root) and not model_folder.is_diffusers_layout(original_root)
    assert model_folder.check_layout(tiny_root, VERSION) == tiny_root
    assert model_folder.task_of(tiny_root, None) == "t2v"
    for version, changes in VERSIONS.items():
        assert model_folder.check_layout(original_root, version) == original_root
        assert model_folder.task_of(original_root, version) == changes["task_type"]


def test_a_version_must_be_there_and_without_one_the_only_one_is_chosen(original_root, tmp_path):
    with pytest.raises(ValueError, match=f"received '720p_t2v', .* holds {', '.join(sorted(VERSIONS))}") as error:
        model_folder.check_layout(original_root, "720p_t2v")
    assert "--include 'transformer/720p_t2v/*'" in str(error.value)
    with pytest.raises(ValueError, match=f"none was named, .* holds {', '.join(sorted(VERSIONS))}"):
        model_folder.transformer_folder(original_root, None)
    shutil.copytree(original_root / "transformer" / "480p_i2v", tmp_path / "transformer" / "mine")
    assert model_folder.transformer_folder(tmp_path, None) == tmp_path / "transformer" / "mine"


LARGE = 2**23 + 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights" / "sub").mkdir(parents=True)
    (tmp_path / "weights" / "large.bin").write_bytes(bytes(LARGE))
    (tmp_path / "weights" / "sub" / "small.bin").write_bytes(bytes(2**21))
    return tmp_path / "weights"


def test_where_weights_lie_and_when_they_were_downloaded_does_not_count(folder, tmp_path):
    before = fingerprint([folder])
    linked = tmp_path / "linked"
    shutil.copytree(folder, linked, ignore=shutil.ignore_patterns("sub"))
    assert fingerprint([linked]) != before
    (linked / "sub").symlink_to(folder / "sub")  # as one large encoder that several models share
    for same in (shutil.copytree(folder, tmp_path / "copy"), linked):
        assert fingerprint([same]) == before
    note = folder / ".cache" / "huggingface" / "download" / "large.bin.metadata"
    note.parent.mkdir(parents=True)
    note.write_text("1795372069.1")
    assert fingerprint([folder]) == before


def test_a_small_file_is_read_whole_and_a_large_one_sampled_from_its_first_byte_to_its_last(folder):
    found = [fingerprint([folder])]
    in_small = [(place, place + 1) for place in (0, 2**20 + 3, 2**21 - 1)]
    in_large = [(0, 1), (LARGE // 2, LARGE // 2 + 2**18), (LARGE - 1, LARGE)]
    for name, size, changes in (("sub/small.bin", 2**21, in_small), ("large.bin", LARGE, in_large)):
        for start, stop in changes:
            content = bytearray(size)
            content[start:stop] = b"\1" * (stop - start)
            (folder / name).write_bytes(content)
            found.append(fingerprint([folder]))
    assert len(set(found)) == len(found) == 7


def test_names_sizes_and_the_order_of_folders_count(folder, tmp_path):
    before, other = fingerprint([folder]), tmp_path / "other"
    assert fingerprint([folder, other]) == before  # not there
    other.mkdir()
    (other / "file").write_bytes(b"x")
    assert fingerprint([folder, other]) != fingerprint([other, folder])
    assert fingerprint([other / "file"]) not in (fingerprint([]), fingerprint([other]))
    (folder / "large.bin").rename(folder / "renamed.bin")
    renamed = fingerprint([folder])
    (folder / "renamed.bin").write_bytes(bytes(LARGE + 1))
    assert len({before, renamed, fingerprint([folder])}) == 3
