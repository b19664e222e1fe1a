"""Loading is strict: what is not exactly the model of the config is an error that names what is wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file, save_file

from hyvideo.models.loading import load_pipeline
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from tests.support.equal_runs import assert_same

NETWORKS = ("transformer", "vae", "text_encoder", "text_encoder_2")


def weights_file(root: Path, component: str) -> Path:
    (path,) = (root / component).glob("*.safetensors")
    return path


@pytest.fixture
def copy(tiny_root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_root, tmp_path / "copy")


def load(root: Path, **where: torch.dtype | torch.device | None) -> HunyuanVideo15Pipeline:
    return load_pipeline(root, scheduler=FlowMatchDiscreteScheduler(), **where)


def test_the_weights_are_those_of_the_stock_loader(tiny_root):
    ours, stock = load(tiny_root), HunyuanVideo15Pipeline.from_pretrained(tiny_root)
    assert type(ours.transformer) is HunyuanVideo15Transformer3DModel
    for component in NETWORKS:
        assert_same(getattr(ours, component).state_dict(), getattr(stock, component).state_dict())


def test_every_weight_is_put_where_it_belongs_as_it_is_read(tiny_root):
    """Told by the meta device, since a weight that was put there could not have been moved back."""
    meta = torch.device("meta")
    for encoders_on in (None, meta):
        pipeline = load(tiny_root, device=meta, encoders_on=encoders_on)
        places = {name: {p.device for p in getattr(pipeline, name).parameters()} for name in NETWORKS}
        expected = {name: {meta} for name in NETWORKS[:2]}
        assert places == expected | dict.fromkeys(NETWORKS[2:], {encoders_on or torch.device("cpu")})


def test_dtypes_are_those_asked_for_encoders_and_vae_are_frozen_and_guidance_settings_optional(copy):
    shutil.rmtree(copy / "guider")
    pipeline = load(copy, transformer_dtype=torch.bfloat16, encoder_dtype=torch.float16)
    dtypes = {name: {p.dtype for p in getattr(pipeline, name).parameters()} for name in NETWORKS}
    float16 = {name: {torch.float16} for name in ("vae", "text_encoder")}
    assert dtypes == {"transformer": {torch.bfloat16}, "text_encoder_2": {torch.float32}} | float16
    for component in (getattr(pipeline, name) for name in NETWORKS[1:]):
        assert not component.training and not any(p.requires_grad for p in component.parameters())
    assert pipeline.guider.guidance_scale == 7.5  # the class's own default


@pytest.mark.parametrize("component", NETWORKS)
def test_a_weight_that_is_missing_left_over_or_of_another_shape_is_named(component, copy):
    weights = load_file(weights_file(copy, component))
    gone, wrong = sorted(weights)[:2]
    del weights[gone]
    weights |= {"left.over": torch.zeros(2), wrong: torch.zeros(7)}
    save_file(weights, weights_file(copy, component), metadata={"format": "pt"})
    message = rf"missing keys: {gone}; unexpected keys: left\.over; mis-shaped keys: {wrong} \(expected"
    with pytest.raises(ValueError, match=f"{component}.*{message}"):
        load(copy)


@pytest.mark.parametrize(
    ("component", "name", "value", "message"),
    [
        ("transformer", "num_layers", 3, r"missing keys: transformer_blocks\.2"),
        ("transformer", "num_layers", 10**9, "num_layers is .*, expected less than"),
        ("transformer", "text_embed_dim", 10**9, "text_embed_dim is .*, expected less than"),
        ("transformer", "mlp_ratio", 1e30, "mlp_ratio is .*, expected less than"),
        ("transformer", "rope_theta", float("nan"), "rope_theta is .*, expected less than"),
        ("vae", "block_out_channels", [2**40], "block_out_channels is .*, expected less than"),
        ("text_encoder", "num_hidden_layers", 10**9, "num_hidden_layers is .*, expected less than"),
        ("text_encoder", "rope_parameters", {"rope_theta": 1e30}, "rope_theta is .*, expected less than"),
        ("text_encoder", "hidden_size", 2**12, r"mis-shaped keys: embed_tokens\.weight"),
        ("text_encoder_2", "vocab_size", 2**20 - 1, r"mis-shaped keys: .*shared\.weight"),
    ],
)
def test_a_config_of_another_network_or_of_absurd_sizes_is_refused(copy, component, name, value, message):
    path = copy / component / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=f"{component}.*{message}"):
        load(copy)


@pytest.mark.parametrize("file", [*NETWORKS, "tokenizer/tokenizer.json", "tokenizer_2/tokenizer_config.json"])
def test_a_file_that_was_cut_short_is_named(file, copy):
    path = weights_file(copy, file) if file in NETWORKS else copy / file
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=f"Cannot (read|load) .*{file}"):
        load(copy)
