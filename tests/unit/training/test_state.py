"""A run's state comes back bit for bit, only into a run with the same settings; the code's version names every edit."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hyvideo.checkpoint.train_state import FACTS, latest_checkpoint
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.training.state import RunState, changed_settings, code_version
from tests.support.equal_runs import assert_same
from tests.support.training import write_prompts


def everything(state: RunState) -> dict[str, Any]:
    """All that decides a run's future, as plain values and copies of tensors."""
    algorithm, optimizers = state.algorithm, state.optimization.optimizers
    moments_of = get_optimizer_state_dict(state.transformer, tuple(optimizers))["state"]
    return {
        "policy": {name: p.detach().clone() for name, p in trainable_parameters(state.transformer).items()},
        "optimizer": {f"{name}.{key}": value.clone() for name, one in moments_of.items() for key, value in one.items()},
        "anchor": {name: value.clone() for name, value in algorithm.anchor.state_dict().items()},
        "rng": {"cpu": torch.get_rng_state()},
        "numbers": [algorithm.controller.state_dict(), state.sampler.state_dict(), algorithm.anchor.equals_policy],
    }


STATES = {"full": {}, "lora": {"use_lora": True}, "lora with muon": {"use_lora": True, "use_muon": True}}
STATES["anchor at the policy"] = {"update_ref_model_step": 1}


@pytest.mark.parametrize("settings", STATES.values(), ids=STATES)
def test_the_state_comes_back_bit_for_bit(make_training, trained, settings: dict[str, Any]):
    first = trained(max_steps=3, **settings)
    torch.randn(7)  # the libraries' generator has moved on
    checkpoint = first.state.save(first.folder.path / "again", keep_last=None)
    expected = everything(first.state)
    assert expected["optimizer"] and expected["anchor"]
    second = make_training(max_steps=3, **settings)
    second.state.load(checkpoint)
    received = everything(second.state)
    assert received.pop("numbers") == expected.pop("numbers") and second.state.step == 3
    for group, tensors in expected.items():
        assert_same(received[group], tensors)


def test_a_save_completes_the_one_that_is_still_being_written(make_training, tmp_path: Path):
    state = make_training().state
    first, second = (state.save(tmp_path / name, keep_last=None, beside_training=True) for name in ("a", "b"))
    assert latest_checkpoint(first.parent) == first and latest_checkpoint(second.parent) is None
    state.finish_save()
    assert latest_checkpoint(second.parent) == second


def test_a_save_before_the_first_update_leaves_the_optimizer_at_its_start(make_training):
    state = make_training().state
    saved = state.tensors()["optimizer"]
    steps = {name: value for name, value in saved.items() if name.endswith(".step")}
    assert steps and not any(steps.values())
    assert not any(moments["step"] for each in state.optimization.optimizers for moments in each.state.values())


def test_a_resume_may_add_a_gpu_and_cannot_add_what_other_kl_settings_need(make_training, trained, monkeypatch):
    first = trained(max_steps=1, kl_weight=0.0)
    checkpoint = first.folder.checkpoints / "step_1"
    with_gpu = {"cpu": torch.get_rng_state(), "cuda": torch.zeros(16, dtype=torch.uint8)}
    monkeypatch.setattr("hyvideo.training.state.rng_state", lambda: with_gpu)
    second = make_training(max_steps=1, kl_weight=0.0)
    second.state.load(checkpoint)
    assert second.state.step == 1
    with pytest.raises(ValueError, match="was made without the anchor that this run's settings need"):
        make_training(max_steps=1).state.load(checkpoint, may_change=["kl_weight"])


def test_settings_change_where_they_are_named_and_nowhere_else(make_training, trained):
    first = trained(max_steps=1, learning_rate=1e-4)
    checkpoint = first.folder.checkpoints / "step_1"
    changed = {"learning_rate": 1e-5, "num_generations": 4, "resume_from_checkpoint": str(checkpoint)}
    changed |= {"max_steps": 2, "activation_checkpointing": "full"}  # these need no name
    with pytest.raises(ValueError, match=r"num_generations is 4.* with --resume_may_change num_generations\."):
        make_training(**changed, resume_may_change=["learning_rate"])
    second = make_training(**changed, resume_may_change=["learning_rate", "num_generations", "eta"])
    console = (second.folder.path / "console.log").read_text()
    assert "changed: learning_rate is 1e-05, the checkpoint has 0.0001" in console
    assert console.count("changed: ") == 2
    second.train()
    again = make_training(**{**changed, "resume_from_checkpoint": str(second.folder.checkpoints / "step_2")})
    assert again.state.step == 2


def test_every_setting_in_the_way_of_a_resume_is_named_those_newer_than_the_checkpoint_too(tmp_path: Path):
    (tmp_path / FACTS).write_text(json.dumps({"format": 4, "step": 1, "settings": {"learning_rate": 1e-5}}))
    settings = {"learning_rate": 1e-4, "clip_range": 0.5}
    said = r"clip_range is 0.5, the checkpoint is older.* with --resume_may_change learning_rate clip_range\."
    with pytest.raises(ValueError, match=said):
        changed_settings(tmp_path, settings, ())
    assert len(changed_settings(tmp_path, settings, ["learning_rate", "clip_range"])) == 1


EDITS = {
    "a byte order mark is added": lambda content: b"\xef\xbb\xbf" + content,
    "line ends are changed": lambda content: content.replace(b"\r\n", b"\n"),
    "a row is appended": lambda content: content + b"a red square moves slowly to the left,\r\n",
}


def test_edited_prompts_are_refused_unless_they_may_change_and_those_of_a_validation_are_told(make_training, tmp_path):
    csv, valid = write_prompts(tmp_path / "mine.csv"), write_prompts(tmp_path / "valid.csv")
    files, content = {"train_video_csv": csv, "valid_video_csv": valid}, csv.read_bytes()
    first = make_training(max_steps=1, **files)
    first.train()
    resumed = files | {"resume_from_checkpoint": first.folder.checkpoints / "step_1"}
    for edit in EDITS.values():
        csv.write_bytes(edit(content))
        assert csv.read_bytes() != content
        with pytest.raises(ValueError, match=r"the content of .*mine\.csv is.*--resume_may_change train_video_csv\."):
            make_training(**resumed)
    valid.write_bytes(csv.read_bytes())
    second = make_training(**resumed, resume_may_change=["train_video_csv"])
    assert second.state.step == 1
    assert f"changed: the content of {valid} is '" in (second.folder.path / "console.log").read_text()


def test_what_shapes_the_trained_tensors_cannot_change(trained):
    targets, adapter = (["to_q", "to_k"], ["to_q"]), {"max_steps": 1, "use_lora": True}
    wide, narrow = (trained(**adapter, lora_target_modules=names) for names in targets)
    with pytest.raises(ValueError, match="has 6 trained weights that this run would drop, among them .*to_k"):
        narrow.state.load(wide.folder.checkpoints / "step_1", may_change=["lora_target_modules"])
    with pytest.raises(ValueError, match="model settings .pretrained_model_root, LoRA, optimizer. differ"):
        wide.state.load(narrow.folder.checkpoints / "step_1", may_change=["lora_target_modules"])


def test_a_checkpoint_of_other_settings_or_a_damaged_one_is_refused(make_training, trained):
    training = trained(max_steps=1)
    checkpoint = training.folder.checkpoints / "step_1"
    with pytest.raises(ValueError, match=rf"(?s)'{checkpoint}' was made with other settings.*config\.yaml") as error:
        make_training(eta=0.4, dtype="bf16", master_weight_type="bf16").state.load(checkpoint)
    assert "eta is 0.4, the checkpoint has 0.5" in str(error.value)
    assert "master_weight_type is 'bf16', the checkpoint has 'fp32'" in str(error.value)
    (file,) = checkpoint.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    with pytest.raises(ValueError, match=f"'{checkpoint}' is damaged: {file.name} has other content"):
        training.state.load(checkpoint)


HASH = "[0-9a-f]{16}"


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=Ann", "-c", "user.email=ann@localhost")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_and_every_edit_are_told(tmp_path: Path, monkeypatch):
    git(tmp_path, "init")  # around the project: not its own
    package = tmp_path / "project" / "hyvideo"
    package.mkdir(parents=True)
    (package / "loss.py").write_text("weight = 1\n")
    alone = code_version(package)
    assert re.fullmatch(HASH, alone)
    git(package.parent, "init")
    git(package.parent, "add", ".")
    assert code_version(package) == alone  # no commit yet
    git(package.parent, "commit", "-m", "first")
    assert re.fullmatch(rf"{alone} \(commit [0-9a-f]+\)", code_version(package))
    (package / "loss.py").write_text("weight = 2\n")
    edited = code_version(package)
    assert re.fullmatch(rf"{HASH} \(commit [0-9a-f]+-dirty\)", edited) and alone not in edited
    (package / "loss.py").write_text("weight = 3\n")
    assert code_version(package) != edited
    monkeypatch.setenv("PATH", "")
    assert re.fullmatch(HASH, code_version(package))
