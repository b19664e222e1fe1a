"""What a run trained can be taken out of its checkpoint and put into the base model."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from hyvideo.checkpoint import trained_policy
from hyvideo.checkpoint.train_state import FACTS, one_process
from hyvideo.checkpoint.trained_policy import check_checkpoint, load_trained_policy
from hyvideo.models.adapter import ADAPTER
from hyvideo.models.attention import install_attention
from hyvideo.models.loading import load_transformer
from hyvideo.training.run import Training
from tests.support.equal_runs import assert_same
from tests.support.original_layout import original_transformer, original_transformer_tensors
from tests.support.tiny_model import build_transformer
from tests.support.training import collect_round


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
def test_the_base_model_becomes_the_trained_policy(
    make_training: Callable[..., Training], tiny_root: Path, use_lora: bool
):
    training = make_training(max_steps=2, use_lora=use_lora)
    training.train()
    pipeline, trajectory = training.policy.pipeline, collect_round(training)
    arguments = (trajectory.rollout.latents[:, 0], 0, trajectory.conditioning_of(torch.arange(4)))
    with torch.no_grad():
        expected = pipeline.velocity(*arguments, training.policy.guidance)
        fresh = load_transformer(tiny_root)
        pipeline.transformer = install_attention(fresh)
        assert not torch.allclose(pipeline.velocity(*arguments, training.policy.guidance), expected)
        load_trained_policy(fresh, training.run.folder.checkpoints / "step_2")
        assert torch.equal(pipeline.velocity(*arguments, training.policy.guidance), expected)


def test_facts_of_earlier_versions_are_read_and_a_dropout_is_refused(
    make_training: Callable[..., Training], tiny_root: Path
):
    training = make_training(use_lora=True)
    checkpoint = training.run.state.save(training.run.folder.checkpoints, keep_last=None)
    facts = json.loads((checkpoint / FACTS).read_text())

    def read_with(dropout: float) -> HunyuanVideo15Transformer3DModel:
        (checkpoint / FACTS).write_text(json.dumps(facts | {"lora": facts["lora"] | {"dropout": dropout}}))
        fresh = load_transformer(tiny_root)
        load_trained_policy(fresh, checkpoint)
        return fresh

    assert ADAPTER in read_with(0.0).peft_config
    for dropout in (0.1, -0.1, math.nan):
        with pytest.raises(ValueError, match=rf"(?s)'{checkpoint}' has a damaged facts\.json: .*lora\.dropout"):
            read_with(dropout)


@pytest.mark.parametrize("change", [{"num_layers": 1}, {"num_attention_heads": 4}], ids=["names", "shapes"])
def test_a_checkpoint_of_another_model_is_refused(
    make_training: Callable[..., Training], tiny_root: Path, change: dict[str, int]
):
    training = make_training(max_steps=1)
    training.train()
    checkpoint = training.run.folder.checkpoints / "step_1"
    other = HunyuanVideo15Transformer3DModel.from_config({**load_transformer(tiny_root).config, **change})
    with pytest.raises(ValueError, match=f"'{checkpoint}'"):
        load_trained_policy(other, checkpoint)


def test_a_folder_that_is_no_checkpoint_is_refused(tiny_root: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=f"'{tmp_path}' is not a readable checkpoint"):
        load_trained_policy(load_transformer(tiny_root), tmp_path)


def save_original(folder: Path, tensors: dict[str, Tensor]) -> Path:
    with one_process():
        dcp.save({"model": tensors}, checkpoint_id=folder / "transformer", no_dist=True)
    return folder


@pytest.mark.parametrize("read_ahead", [2**30, 100_000])
def test_the_base_becomes_the_network_that_the_original_script_trained(
    original_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_ahead: int
):
    trained = build_transformer(99, num_refiner_layers=2, target_size=640)
    monkeypatch.setattr(trained_policy, "READ_AHEAD", read_ahead)
    checkpoint = save_original(tmp_path / "checkpoint-7", original_transformer_tensors(trained.state_dict()))
    transformer = load_transformer(original_root, "480p_t2v")
    check_checkpoint(checkpoint)
    load_trained_policy(transformer, checkpoint)
    assert_same(transformer.state_dict(), trained.state_dict())


def test_an_adapter_beside_an_original_checkpoint_is_added(original_root: Path, tmp_path: Path):
    base = original_transformer("480p_t2v")
    tensors = original_transformer_tensors(base.state_dict())
    module, down, up = "double_blocks.0.img_attn_q", torch.ones(2, 32), torch.ones(32, 2)
    stored = {name.replace(f"{module}.", f"{module}.base_layer."): tensor for name, tensor in tensors.items()}
    stored[f"{module}.lora_A.default.weight"] = down
    checkpoint = save_original(tmp_path / "checkpoint-7", stored)
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


def test_an_original_checkpoint_of_another_model_is_refused_and_changes_nothing(original_root: Path, tmp_path: Path):
    other = build_transformer(num_refiner_layers=2, num_layers=3)
    checkpoint = save_original(tmp_path / "checkpoint-7", original_transformer_tensors(other.state_dict()))
    transformer = load_transformer(original_root, "480p_t2v")
    with pytest.raises(ValueError, match=r"unexpected keys: double_blocks\.2\..*Pass the base model"):
        load_trained_policy(transformer, checkpoint)
    assert_same(transformer.state_dict(), original_transformer("480p_t2v").state_dict())


def test_damage_of_an_original_checkpoint_is_named(original_root: Path, tmp_path: Path):
    trained = build_transformer(99, num_refiner_layers=2, target_size=640)
    checkpoint = save_original(tmp_path / "checkpoint-7", original_transformer_tensors(trained.state_dict()))
    (data,) = (checkpoint / "transformer").glob("*.distcp")
    content, index = data.read_bytes(), checkpoint / "transformer" / ".metadata"
    for path, damaged, said in (
        (data, bytes(1000) + content[1000:], f"Cannot restore '{index.parent}'.*The checkpoint is damaged.$"),
        (data, content[:1000], rf"not a readable checkpoint.* bytes at .* of {data.name}, which has 1000"),
        (index, b"", "not a readable checkpoint"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=said):
            load_trained_policy(load_transformer(original_root, "480p_t2v"), checkpoint)
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        check_checkpoint(checkpoint)
