"""Adapters are saved as they are, and refused where they do not fit."""

import re
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file

from hyvideo.models.adapter import ADAPTER_FILE, adapter_weights, draw_adapter, load_lora, lora_config, save_lora
from hyvideo.models.parallelize import prepare_policy
from tests.support.equal_runs import assert_same
from tests.support.tiny_model import ADAPTER, build_transformer


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
    save_lora(policy, tmp_path / "apart", adapter_weights(policy))
    (inside, note), (apart, other_note) = read(tmp_path / "inside"), read(tmp_path / "apart")
    assert other_note == note
    assert_same(apart, inside)


@pytest.mark.parametrize("change", [{"num_attention_heads": 4}, {"num_layers": 3}])
def test_an_adapter_of_another_model_is_refused(either, tmp_path, change):
    save(build_transformer(**change), tmp_path)
    with pytest.raises(ValueError, match="does not fit this transformer"):
        load_lora(either, tmp_path)


def test_memory_that_is_full_is_not_said_to_be_an_adapter_that_does_not_fit(policy, tmp_path, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    save(policy, tmp_path)
    monkeypatch.setattr(HunyuanVideo15Transformer3DModel, "load_lora_adapter", fail)
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


@pytest.mark.parametrize(
    "names",
    [
        ["lora_unet_double_blocks_0_img_attn_q.lora_down.weight", "lora_unet_double_blocks_0_img_attn_q.alpha"],
        ["transformer_blocks.0.attn.to_q.lora.up.weight", "transformer_blocks.0.attn.to_q.lora.down.weight"],
        ["transformer_blocks.0.attn.to_q.lora_A.weight"],
        ["weight"],
        [],
    ],
)
def test_an_adapter_that_is_named_in_another_way_is_told_what_is_expected(policy, tmp_path, names):
    save_file({name: torch.ones(2, 32) for name in names}, tmp_path / ADAPTER_FILE)
    held = ", ".join(sorted(names)) or "no tensors"
    with pytest.raises(ValueError, match=f"it holds {held}; expected matrices <module>.lora_A.weight and"):
        load_lora(policy, tmp_path)
    with pytest.raises(ValueError, match=f"'{tmp_path / ADAPTER_FILE}' is a file. Name the folder that holds it"):
        load_lora(policy, tmp_path / ADAPTER_FILE)


@pytest.mark.parametrize("alpha", [10**400, -(2**64)], ids=["huge", "negative"])
def test_an_absurd_alpha_is_refused(alpha):
    with pytest.raises(ValueError, match="the alpha of an adapter is .*, expected less than"):
        lora_config(4, alpha, ["to_q"])


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
        draw_adapter(empty, seed)
        return adapter_weights(empty)

    received, again, other = drawn(3), drawn(3), drawn(4)
    torch.manual_seed(0)
    librarys = adapter_weights(prepare_policy(build_transformer(), gradient_checkpointing=False, lora=ADAPTER))
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
