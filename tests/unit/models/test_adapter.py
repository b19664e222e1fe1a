"""Adapters are saved as they are, and refused where they do not fit."""

import re
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors import safe_open
from safetensors.torch import save_file

from hyvideo.config.schema import Config
from hyvideo.models.adapter import (
    ADAPTER_FILE,
    adapter_weights,
    draw_adapter,
    load_lora,
    lora_config,
    save_lora,
)
from hyvideo.models.parallelize import prepare_policy
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from tests.support.tiny_model import ADAPTER, build_transformer


@pytest.fixture
def policy(pipeline: HunyuanVideoGRPOPipeline) -> HunyuanVideo15Transformer3DModel:
    return pipeline.transformer


def test_weights_given_apart_are_saved_as_those_inside(policy, tmp_path: Path):
    prepare_policy(policy, gradient_checkpointing=False, lora=ADAPTER)
    save_lora(policy, tmp_path / "inside")
    save_lora(policy, tmp_path / "apart", adapter_weights(policy))
    with (
        safe_open(tmp_path / "inside" / ADAPTER_FILE, "pt") as inside,
        safe_open(tmp_path / "apart" / ADAPTER_FILE, "pt") as apart,
    ):
        assert apart.metadata() == inside.metadata()
        assert apart.keys() == inside.keys()
        assert all(torch.equal(apart.get_tensor(name), inside.get_tensor(name)) for name in inside.keys())


def test_a_folder_without_an_adapter_is_named(policy, tmp_path: Path):
    with pytest.raises(ValueError, match=f"no adapter at '{tmp_path}"):
        load_lora(policy, tmp_path)


@pytest.mark.parametrize("change", [{"num_attention_heads": 4}, {"num_layers": 3}])
def test_an_adapter_of_another_model_is_refused(policy, tmp_path: Path, change: dict[str, int]):
    other = HunyuanVideo15Transformer3DModel.from_config({**policy.config, **change})
    prepare_policy(other, gradient_checkpointing=False, lora=ADAPTER)
    save_lora(other, tmp_path)
    with pytest.raises(ValueError, match="does not fit this transformer"):
        load_lora(policy, tmp_path)


def test_an_adapter_with_other_settings_than_the_runs_is_refused(policy, tmp_path: Path):
    prepare_policy(policy, gradient_checkpointing=False, lora=ADAPTER)
    save_lora(policy, tmp_path)
    policy.delete_adapters("default")
    wanted = lora_config(8, 4, Config().model.lora_target_modules)
    with pytest.raises(ValueError, match="lora_r is 8, the adapter has 2"):
        prepare_policy(policy, gradient_checkpointing=False, lora=wanted, pretrained_lora_path=str(tmp_path))


def test_an_adapter_of_other_modules_than_the_runs_is_refused(policy, tmp_path: Path):
    prepare_policy(policy, gradient_checkpointing=False, lora=lora_config(2, 4, ["to_q", "to_k"]))
    save_lora(policy, tmp_path)
    policy.delete_adapters("default")
    wanted = lora_config(2, 4, ["to_q"])
    with pytest.raises(ValueError, match=r"lora_target_modules chooses 3 modules, the adapter has 6, .*to_k"):
        prepare_policy(policy, gradient_checkpointing=False, lora=wanted, pretrained_lora_path=str(tmp_path))


def test_a_damaged_adapter_file_is_named(policy, tmp_path: Path):
    prepare_policy(policy, gradient_checkpointing=False, lora=ADAPTER)
    save_lora(policy, tmp_path)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    policy.delete_adapters("default")
    with pytest.raises(ValueError, match=str(file)):
        load_lora(policy, tmp_path)


@pytest.fixture
def empty_policy() -> HunyuanVideo15Transformer3DModel:
    """A network before it has memory, as a run prepares it."""
    with torch.device("meta"):
        return build_transformer()


@pytest.mark.parametrize("network", ["policy", "empty_policy"])
@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_an_adapter_that_is_not_whole_is_refused(
    policy, tmp_path: Path, request: pytest.FixtureRequest, network: str, matrix: str
):
    prepare_policy(policy, gradient_checkpointing=False, lora=ADAPTER)
    save_lora(policy, tmp_path)
    with safe_open(tmp_path / ADAPTER_FILE, "pt") as file:
        tensors, note = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    policy.delete_adapters("default")
    gone = next(name for name in tensors if matrix in name)
    del tensors[gone]
    save_file(tensors, tmp_path / ADAPTER_FILE, note)
    with pytest.raises(ValueError, match=rf"is not whole: it lacks {re.escape(gone)} \(1 weights in all\)"):
        load_lora(request.getfixturevalue(network), tmp_path)


def test_a_run_refuses_an_adapter_of_another_width(policy, empty_policy, tmp_path: Path):
    other = HunyuanVideo15Transformer3DModel.from_config({**policy.config, "num_attention_heads": 4})
    prepare_policy(other, gradient_checkpointing=False, lora=ADAPTER)
    save_lora(other, tmp_path)
    with pytest.raises(ValueError, match="does not fit this transformer"):
        load_lora(empty_policy, tmp_path)


def test_a_fresh_adapter_has_the_librarys_distribution_and_depends_on_the_seed_alone():
    def drawn(seed: int) -> dict[str, torch.Tensor]:
        """The first values of an adapter whose network has no memory."""
        with torch.device("meta"):
            empty = build_transformer()
        prepare_policy(empty, gradient_checkpointing=False, lora=ADAPTER)
        torch.rand(seed)  # whatever was drawn before
        draw_adapter(empty, seed)
        return adapter_weights(empty)

    received, again, other = drawn(3), drawn(3), drawn(4)
    torch.manual_seed(0)
    librarys = adapter_weights(prepare_policy(build_transformer(), gradient_checkpointing=False, lora=ADAPTER))
    assert received.keys() == librarys.keys()
    first = [name for name in received if "lora_A" in name]
    assert 2 * len(first) == len(received)
    for name, value in received.items():
        assert torch.equal(value, again[name])
        assert value.shape == librarys[name].shape
        assert torch.equal(value, other[name]) == (name not in first)
    spreads = [torch.cat([each[name].flatten() for name in first]).std().item() for each in (received, librarys)]
    assert spreads[0] == pytest.approx(spreads[1], rel=0.03)
    assert all(received[name].abs().max() <= received[name].shape[1] ** -0.5 for name in first)
    assert len({tuple(received[name].flatten()[:4].tolist()) for name in first}) == len(first)
