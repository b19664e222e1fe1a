"""Checkpoints of the original training script become the policy they hold."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from hyvideo.checkpoint import original_checkpoint
from hyvideo.checkpoint.train_state import one_process
from hyvideo.checkpoint.trained_policy import check_checkpoint, load_trained_policy
from hyvideo.models.loading import load_transformer
from tests.support.equal_runs import assert_same
from tests.support.original_layout import original_transformer, original_transformer_tensors
from tests.support.tiny_model import build_transformer


def save(folder: Path, tensors: dict[str, Tensor]) -> Path:
    with one_process():
        dcp.save({"model": tensors}, checkpoint_id=folder / "transformer", no_dist=True)
    return folder


@pytest.fixture
def trained() -> torch.nn.Module:
    return build_transformer(99, num_refiner_layers=2, target_size=640)


@pytest.mark.parametrize("read_ahead", [2**30, 100_000])
def test_the_base_becomes_the_trained_network(
    original_root: Path, trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_ahead: int
):
    monkeypatch.setattr(original_checkpoint, "READ_AHEAD", read_ahead)
    checkpoint = save(tmp_path / "checkpoint-7", original_transformer_tensors(trained.state_dict()))
    transformer = load_transformer(original_root, "480p_t2v")
    check_checkpoint(checkpoint)
    load_trained_policy(transformer, checkpoint)
    assert_same(transformer.state_dict(), trained.state_dict())


def test_an_adapter_beside_it_is_added(original_root: Path, tmp_path: Path):
    base = original_transformer("480p_t2v")
    tensors = original_transformer_tensors(base.state_dict())
    module, down, up = "double_blocks.0.img_attn_q", torch.ones(2, 32), torch.ones(32, 2)
    stored = {name.replace(f"{module}.", f"{module}.base_layer."): tensor for name, tensor in tensors.items()}
    stored[f"{module}.lora_A.default.weight"] = down
    checkpoint = save(tmp_path / "checkpoint-7", stored)
    folder = checkpoint / "lora" / "default"
    folder.mkdir(parents=True)
    save_file(
        {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up},
        folder / "pytorch_lora_weights.safetensors",
        metadata={"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 4, "target_modules": ["img_attn_q"]})},
    )
    transformer = load_transformer(original_root, "480p_t2v")
    load_trained_policy(transformer, checkpoint)
    transformer.fuse_lora()
    received = transformer.transformer_blocks[0].attn.to_q.base_layer.weight
    torch.testing.assert_close(received, base.transformer_blocks[0].attn.to_q.weight + 4 / 2 * 2)
    (folder / "pytorch_lora_weights.safetensors").unlink()
    with pytest.raises(ValueError, match="was trained with an adapter, but there is no '.*safetensors'"):
        load_trained_policy(load_transformer(original_root, "480p_t2v"), checkpoint)


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(original_root: Path, tmp_path: Path):
    other = build_transformer(num_refiner_layers=2, num_layers=3)
    checkpoint = save(tmp_path / "checkpoint-7", original_transformer_tensors(other.state_dict()))
    transformer = load_transformer(original_root, "480p_t2v")
    with pytest.raises(ValueError, match=r"unexpected keys: double_blocks\.2\..*Pass the base model"):
        load_trained_policy(transformer, checkpoint)
    assert_same(transformer.state_dict(), original_transformer("480p_t2v").state_dict())


def test_damage_is_named(original_root: Path, trained, tmp_path: Path):
    checkpoint = save(tmp_path / "checkpoint-7", original_transformer_tensors(trained.state_dict()))
    (data,) = (checkpoint / "transformer").glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(bytes(1000) + content[1000:])
    with pytest.raises(ValueError, match=f"Cannot restore '{checkpoint / 'transformer'}'.*The checkpoint is damaged.$"):
        load_trained_policy(load_transformer(original_root, "480p_t2v"), checkpoint)
    data.write_bytes(content[:1000])
    with pytest.raises(ValueError, match=rf"not a readable checkpoint.* bytes at .* of {data.name}, which has 1000"):
        load_trained_policy(load_transformer(original_root, "480p_t2v"), checkpoint)
    (checkpoint / "transformer" / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        load_trained_policy(load_transformer(original_root, "480p_t2v"), checkpoint)
