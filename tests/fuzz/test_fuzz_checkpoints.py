"""Whatever a checkpoint's JSON files, names and links say: it loads, or a ValueError names it; nothing else happens."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from hyvideo.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify_files, write_manifest
from hyvideo.checkpoint.run_folder import open_run_folder
from hyvideo.checkpoint.train_state import FACTS, begin_save, checkpoints_of, latest_checkpoint, read_facts
from hyvideo.config.schema import RunConfig
from hyvideo.models.weight_files import SafetensorsFolder
from hyvideo.training.run import Run
from tests.support.equal_runs import sign
from tests.support.fuzzing import TEXTS, changed, fuzz, json_files, only_value_errors

WEIGHTS = {"policy": {"w": torch.arange(6.0)}}
RECORD = {"size": 3, "sha256": "0" * 64}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of one tensor, beside a file that is none of its own."""
    (tmp_path / "secret").write_text("secret")
    return begin_save(tmp_path / "checkpoints", 2, WEIGHTS, {"round": 1}).finish()


def manifests(true: dict) -> st.SearchStrategy[bytes]:
    named = st.dictionaries(
        st.one_of(
            TEXTS, st.sampled_from(["../../secret", "/etc/passwd", "", ".", "a/../b", "a" * 300, "facts.json/x"])
        ),
        st.one_of(st.just(RECORD), changed(RECORD)),
        max_size=2,
    )
    return st.one_of(
        json_files(true), named.map(lambda other: json.dumps(true | {"files": true["files"] | other}).encode())
    )


@fuzz()
@given(st.data())
def test_any_manifest_is_true_or_refused_by_name(checkpoint: Path, data: st.DataObject):
    true = read_manifest(checkpoint)
    content = data.draw(manifests(true.model_dump()))
    (checkpoint / MANIFEST).write_bytes(content)
    with only_value_errors(checkpoint):
        verify_files(checkpoint)
        for name, record in Manifest.model_validate_json(content).files.items():
            assert (checkpoint / name).resolve().is_relative_to(checkpoint)
            assert (checkpoint / name).stat().st_size == record.size
    write_manifest(checkpoint, *vars(true).values())


@pytest.mark.parametrize(("name", "read"), [(MANIFEST, verify_files), (FACTS, read_facts)])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_never_ends_is_not_read(checkpoint: Path, name: str, read: Callable, kind: str):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name) if kind == "pipe" else (checkpoint / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"{checkpoint}.*it is a pipe, socket or device"):
        read(checkpoint)


NAMES = st.one_of(
    TEXTS,
    st.sampled_from(["step_2", "step_1", "step_", "step_02", "step_٢", "step_1_0", "step_" + "9" * 300, "../secret"]),
)


@fuzz(4)
@given(json_files({"format": 4, "step": 2, "round": 1}), NAMES)
def test_any_facts_and_any_pointer_resume_or_are_refused_by_name(checkpoint: Path, facts: bytes, latest: str):
    (checkpoint / FACTS).write_bytes(facts)
    (checkpoint.parent / "latest").write_bytes(latest.encode("utf-8", "surrogatepass"))
    for wanted in ("latest", str(checkpoint)):
        config = RunConfig(output_dir=str(checkpoint.parents[1]), resume_from_checkpoint=wanted, max_steps=9)
        with only_value_errors(checkpoint.parent):
            chosen = open_run_folder(config).resume_from
            assert chosen is None or (chosen.parent == checkpoint.parent and read_facts(chosen)["step"] >= 0)


@fuzz(10)
@given(NAMES.filter(lambda name: name not in ("", ".", "..") and "/" not in name and "\0" not in name))
def test_only_step_and_a_number_is_a_checkpoint(checkpoint: Path, name: str):
    other = checkpoint.parent / os.fsdecode(name.encode("utf-8", "surrogatepass"))[:200]
    if other.exists():
        return
    other.mkdir()
    (other / FACTS).write_text("{}")
    number = other.name.removeprefix("step_")
    numbered = number.isdecimal() and number.isascii() and len(number) <= 18
    assert latest_checkpoint(checkpoint.parent) == checkpoint
    assert (other in checkpoints_of(checkpoint.parent)) == (numbered and other.name.startswith("step_"))
    (other / FACTS).unlink()
    other.rmdir()


@pytest.fixture
def trained(make_training) -> tuple[Run, Path]:
    training = make_training(use_lora="true", lora_r=2, lora_alpha=2)
    checkpoint = training.state.save(training.folder.checkpoints, keep_last=None)
    return training, checkpoint


@fuzz(20)
@given(st.data())
def test_any_facts_with_a_true_manifest_load_or_are_refused_by_name(trained, data):
    training, checkpoint = trained
    before = (checkpoint / FACTS).read_bytes()
    facts = json.loads(before)
    (checkpoint / FACTS).write_text(json.dumps(data.draw(changed(facts))))
    sign(checkpoint)
    try:
        with only_value_errors(checkpoint):
            training.state.load(checkpoint)
            assert training.state.step >= 0 and training.state.sampler.round >= 0
            training.state.sampler.next_round()
    finally:
        (checkpoint / FACTS).write_bytes(before)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("a", "b"):
        save_file({name: torch.ones(2, 3)}, folder / f"{name}.safetensors")
    save_file({"c": torch.ones(1)}, tmp_path / "secret.safetensors")
    return folder


INDEX = {"metadata": {"total_size": 48}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}


@fuzz(4)
@given(
    st.one_of(
        json_files(INDEX),
        st.one_of(TEXTS, st.sampled_from(["../secret.safetensors", "./b.safetensors", "b.safetensors/"])).map(
            lambda name: json.dumps({"weight_map": {"a": "a.safetensors", "b": name, "c": name}}).encode()
        ),
    )
)
def test_any_index_of_weights_is_true_or_refused_by_name(shards: Path, content: bytes):
    (shards / "model.safetensors.index.json").write_bytes(content)
    with only_value_errors(shards):
        source = SafetensorsFolder(shards)
        assert {source.read(name, None).shape for name in source.shapes} == {(2, 3)}
        assert source.shapes.keys() == json.loads(content)["weight_map"].keys()
