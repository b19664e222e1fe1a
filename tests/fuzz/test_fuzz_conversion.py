"""Whatever keys, shapes and settings weights come with: they fit exactly, or a ValueError names what does not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from hyvideo.models import conversion
from hyvideo.models.adapter import ADAPTER, load_lora
from hyvideo.models.encoders import load_encoders
from hyvideo.models.loading import load_transformer, load_vae
from hyvideo.models.model_folder import check_layout
from hyvideo.models.weight_files import StateDict, fill
from tests.support.fuzzing import SCALARS, TEXTS, fuzz, json_files, only_value_errors
from tests.support.original_layout import original_transformer, original_transformer_tensors

NETWORK = original_transformer("480p_t2v")
STATE = {name: tensor.clone() for name, tensor in NETWORK.state_dict().items()}
ORIGINAL = original_transformer_tensors(STATE)
NEAR = (lambda n: n[:-1], "{}.".format, "model.{}".format, str.upper, lambda n: n.replace(".0.", ".٣."))
NAMES = st.sampled_from([*STATE, *ORIGINAL])
NEW_NAMES = TEXTS | st.builds(lambda name, near: near(name), NAMES, st.sampled_from(NEAR))
KINDS = st.sampled_from(["lost", "renamed", "extra", "shape", "flat", "dtype"])
SHAPES = st.sampled_from([(), (0,), (1,), (2, 3), (10**6, 0), (3, 2, 1, 1, 1, 1)])
DTYPES = st.sampled_from([torch.float64, torch.bfloat16, torch.float16])
FAULTS = st.lists(st.tuples(KINDS, st.integers(0, 10**4), NEW_NAMES, SHAPES, DTYPES), max_size=3)


def with_faults(valid: dict[str, Tensor], faults: list[tuple]) -> dict[str, Tensor]:
    """These tensors, but some lost, renamed, of another shape or dtype, or joined by others."""
    found = dict(valid)
    for fault, number, new_name, shape, dtype in faults:
        name = list(found)[number % len(found)]
        if fault == "extra":
            found[new_name] = torch.zeros(shape)
            continue
        tensor = found.pop(name)
        changed_to = {"shape": torch.zeros(shape), "flat": tensor.flatten(), "dtype": tensor.to(dtype)}
        if fault != "lost":
            found[new_name if fault == "renamed" else name] = changed_to.get(fault, tensor)
    return found


@fuzz(2)
@given(FAULTS)
def test_any_weights_fill_the_network_or_are_refused_key_by_key(faults: list):
    found = with_faults(ORIGINAL, faults)
    shapes = {name: tensor.shape for name, tensor in ORIGINAL.items()}
    received = {name: tensor.shape for name, tensor in found.items()}
    wrong = {name for name in shapes.keys() | received.keys() if shapes.get(name) != received.get(name)}
    try:
        fill(NETWORK, StateDict(found, "the file"), conversion.transformer_part)
    except ValueError as error:
        assert wrong and all(name in str(error) for name in ["the file", *wrong])
        return
    assert not wrong
    for name, tensor in original_transformer_tensors(NETWORK.state_dict()).items():
        assert torch.equal(tensor, found[name].to(tensor.dtype))


@fuzz(4)
@given(FAULTS)
def test_any_state_is_renamed_whole_or_refused(faults: list):
    found = with_faults(STATE, faults)
    try:
        renamed = dict(conversion.original_tensors(found))
    except KeyError as error:
        with pytest.raises(KeyError):  # the layout has none such
            conversion.transformer_part(error.args[0])
    except ValueError as error:
        assert any(name.split(".")[-1] in str(error) for name in STATE.keys() ^ found.keys())
    except (IndexError, RuntimeError):  # PyTorch's, of shapes that do not go together
        assert faults
    else:
        assert sum(map(torch.numel, renamed.values())) == sum(map(torch.numel, found.values()))


def load_all_encoders(root: Path) -> None:
    check_layout(root, None)
    load_encoders(root, None, vision=False)


LOADERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "transformer/480p_t2v/config.json": ("original_root", lambda root: load_transformer(root, "480p_t2v")),
    "vae/config.json": ("original_root", load_vae),
    "text_encoder/config.json": ("tiny_root", load_all_encoders),
    "text_encoder_2/config.json": ("tiny_root", load_all_encoders),
    "tokenizer/tokenizer.json": ("tiny_root", load_all_encoders),
    "tokenizer/tokenizer_config.json": ("tiny_root", load_all_encoders),
    "tokenizer_2/tokenizer_config.json": ("tiny_root", load_all_encoders),
}
"""A file beside weights, whose layout it is of, and what reads it."""


@pytest.mark.parametrize("name", LOADERS)
@fuzz(6)
@given(st.data())
def test_any_file_beside_weights_loads_or_is_refused_by_name(request, tmp_path: Path, name: str, data: st.DataObject):
    layout, load = LOADERS[name]
    valid, root = json.loads((request.getfixturevalue(layout) / name).read_text()), tmp_path / "root"
    if not root.exists():
        shutil.copytree(request.getfixturevalue(layout), root)
    one_by_one = st.dictionaries(st.sampled_from([*valid]), SCALARS).map(lambda new: json.dumps(valid | new).encode())
    (root / name).write_bytes(data.draw(json_files(valid) | one_by_one))
    with only_value_errors(root):
        load(root)


MODULES = ("double_blocks.1.img_attn_q", "txt_in.individual_token_refiner.blocks.1.self_attn_qkv", "final_layer.linear")
SETTINGS = {"r": 4, "lora_alpha": 6, "target_modules": ["to_q"], "use_dora": False, "peft_type": "LORA"}
SETTINGS |= {"rank_pattern": {"x": 2}, "alpha_pattern": {"^final_layer\\.linear": 3}}


def adapter() -> dict[str, Tensor]:
    shapes = {module: ORIGINAL[f"{module}.weight"].shape for module in MODULES}
    down = {f"{module}.lora_A.weight": torch.ones(4, columns) for module, (_, columns) in shapes.items()}
    return down | {f"{module}.lora_B.weight": torch.ones(rows, 4) for module, (rows, _) in shapes.items()}


BARE = original_transformer("480p_t2v")
PATTERNS = st.dictionaries(TEXTS | st.just("(([a-z_.0-9])+)+$!"), SCALARS, max_size=2)
PATTERNED = st.dictionaries(st.sampled_from(["alpha_pattern", "rank_pattern"]), PATTERNS, max_size=1)
NOTES = PATTERNED.map(lambda patterns: json.dumps(SETTINGS | patterns).encode())


@fuzz(5)
@given(FAULTS, st.none() | json_files(SETTINGS) | NOTES)
def test_any_adapter_is_added_or_refused_by_name(tmp_path: Path, faults: list, note: bytes | None):
    metadata = None if note is None else {"lora_adapter_metadata": note.decode("utf-8", "replace")}
    path, found = tmp_path / "pytorch_lora_weights.safetensors", with_faults(adapter(), faults)
    save_file({name.replace("\ud800", "?"): tensor.clone() for name, tensor in found.items()}, path, metadata)
    with only_value_errors(path):
        load_lora(BARE, tmp_path)
    if getattr(BARE, "peft_config", None):
        BARE.delete_adapters(ADAPTER)
