"""A checkpoint is whole or not there, comes back bit for bit, and a damaged one or one of another model says so."""

import json
import os
import random
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from diffusers import HunyuanVideo15Transformer3DModel

from hyvideo.checkpoint import train_state
from hyvideo.checkpoint.tensors import MANIFEST, StoredTensors, TensorWriter, load_tensors, require_dtypes, verify_files
from hyvideo.checkpoint.train_state import BEST, FACTS, LATEST, SaveError, begin_save, checkpoints_of, latest_checkpoint
from hyvideo.checkpoint.trained_policy import check_checkpoint, load_trained_policy
from hyvideo.models.loading import load_transformer
from tests.support.equal_runs import tensors_of
from tests.support.limits import limited

DATA = "shard-00001-model-00001-of-00001.safetensors"


def tensors(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(5, 3, generator=generator), torch.randn(5, generator=generator).bfloat16()
    return {
        "policy": {"block.weight": weight, "block.bias": bias},
        "optimizer": {"step": torch.tensor(float(seed)), "count": torch.tensor([seed])},
        "rng": {"cpu": generator.get_state()},
        "ema": {"nothing": torch.zeros(0, 3), "row": torch.full((9, 9), seed)[2:4]},
    }


def save(folder: Path, *steps: int, **options: object) -> Path:
    for step in steps:
        saved = begin_save(folder, step, tensors(step), {"round": step * 2, "text": "ü"}, **options).finish()
    return saved


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lost_link(path: Path) -> None:
    path.symlink_to("nowhere")


def assert_whole(checkpoint: Path, step: int) -> None:
    assert train_state.read_facts(checkpoint)["step"] == step
    received = tensors(seed=99)
    load_tensors(checkpoint, received)
    for group, expected in tensors(step).items():
        for name, value in expected.items():
            assert received[group][name].dtype == value.dtype and torch.equal(received[group][name], value), name


def test_tensors_and_facts_come_back_and_what_a_killed_save_has_left_goes(tmp_path):
    (tmp_path / "step_2.partial").mkdir()
    (tmp_path / "step_2.partial" / "weights").write_bytes(b"half")
    checkpoint = save(tmp_path, 3)
    assert checkpoint == tmp_path / "step_3" and names_in(tmp_path) == [LATEST, "step_3"]
    assert_whole(checkpoint, 3)
    assert train_state.read_facts(checkpoint).items() >= {"round": 6, "text": "ü"}.items()
    for name in ("step_final.partial", "step_final.replaced", "step_2_of_mine.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").touch()
    assert save(tmp_path, 4) == latest_checkpoint(tmp_path)
    assert len(list(tmp_path.glob("*/notes"))) == 3  # folders of the user are left alone


def test_a_linked_checkpoint_that_is_made_again_stays_where_it_was_moved_and_stops_no_later_save(tmp_path):
    checkpoints, moved = tmp_path / "checkpoints", tmp_path / "disk" / "step_5"
    save(checkpoints, 3, 5)
    shutil.move(checkpoints / "step_5", moved)
    (checkpoints / "step_5").symlink_to(moved)
    train_state.point(LATEST, checkpoints / "step_3")  # a resume from there
    for step in (5, 6):
        assert save(checkpoints, step) == latest_checkpoint(checkpoints) == checkpoints / f"step_{step}"
    assert not (checkpoints / "step_5").is_symlink()
    assert names_in(checkpoints) == [LATEST, "step_3", "step_5", "step_6"]
    for whole in (moved, checkpoints / "step_5"):
        assert_whole(whole, 5)
    (checkpoints / "step_2").symlink_to(moved)  # an old one of which only the link may go
    assert save(checkpoints, 7, keep_last=1) == latest_checkpoint(checkpoints)
    assert_whole(moved, 5)


@pytest.mark.parametrize("make", [os.mkfifo, lost_link, Path.touch])
@pytest.mark.parametrize("name", ["step_2", "step_2.replaced", "step_2.partial", "step_1.replaced"])
def test_a_pipe_a_lost_link_or_a_file_in_a_checkpoints_place_stops_neither_a_resume_nor_a_save(tmp_path, name, make):
    save(tmp_path, 1)
    make(tmp_path / name)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1"
    save(tmp_path, 2)
    for step in (1, 2):
        assert_whole(tmp_path / f"step_{step}", step)
    assert names_in(tmp_path) == [LATEST, "step_1", "step_2"]


@pytest.mark.parametrize(
    ("saves", "options", "kept"),
    [
        ([8, 9, 10, 11], {"keep_last": 2}, [10, 11]),
        ([2, 4, 8, 10], {}, [2, 4, 8, 10]),
        ([104, 152, 200, 304, 352, 400, 448], {"keep_last": 1, "keep_every": 100}, [104, 200, 304, 400, 448]),
    ],
)
def test_of_old_checkpoints_those_asked_for_stay_and_those_of_a_given_up_future(tmp_path, saves, options, kept):
    assert latest_checkpoint(tmp_path) is None
    for step in saves:
        assert save(tmp_path, step, **options) == latest_checkpoint(tmp_path) == tmp_path / f"step_{step}"
    assert checkpoints_of(tmp_path) == [tmp_path / f"step_{step}" for step in kept]
    assert save(tmp_path, 7, keep_last=2) == latest_checkpoint(tmp_path)  # resumed from further back
    kept = [step for step in kept if step != 2]
    assert checkpoints_of(tmp_path) == [tmp_path / f"step_{step}" for step in sorted([7, *kept])]


def test_only_step_and_a_number_is_a_checkpoint(tmp_path):
    save(tmp_path, 2)
    for name in ("step_", "step_٢", "step_1_0", "step_-1", "step_" + "9" * 19, "steps_3", "3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FACTS).write_text("{}")
    assert checkpoints_of(tmp_path) == [tmp_path / "step_2"] == [latest_checkpoint(tmp_path)]


def test_a_best_checkpoint_is_kept_and_one_that_was_deleted_by_hand_stops_no_save(tmp_path):
    train_state.point(BEST, save(tmp_path, 1))
    save(tmp_path, 2, 3, keep_last=1)
    assert [path.name for path in checkpoints_of(tmp_path)] == ["step_1", "step_3"]
    shutil.rmtree(tmp_path / "step_1")
    assert save(tmp_path, 4, keep_last=1) == latest_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="best' names 'step_1', which is not a finished checkpoint beside it"):
        train_state.named_checkpoint(tmp_path / BEST)


class KilledError(Exception):
    """Stands for the end of the process."""


KILLS = ["before tensors", "after tensors", "before the folder is renamed", "before latest moves"]
KILLS_OF_A_STEP_AGAIN = [*KILLS[:3], "between the two renames", "before latest moves"]


@pytest.mark.parametrize(
    ("step", "moment"), [*((2, moment) for moment in KILLS), *((1, moment) for moment in KILLS_OF_A_STEP_AGAIN)]
)
def test_killed_at_any_moment_latest_names_a_whole_checkpoint(tmp_path, monkeypatch, moment, step):
    save(tmp_path, 1)
    write, replace, replaced = dcp.save, os.replace, []

    def kill(*args: object, **kwargs: object) -> None:
        if moment == "after tensors":
            write(*args, **kwargs)
        raise KilledError

    def kill_at_replace(source: Path, target: Path) -> None:
        replaced.append(target)
        if len(replaced) == (KILLS if step == 2 else KILLS_OF_A_STEP_AGAIN).index(moment) - 1:
            raise KilledError
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(*((dcp, "save", kill) if "tensors" in moment else (os, "replace", kill_at_replace)))
        save(tmp_path, step, keep_last=1)
    assert_whole(latest_checkpoint(tmp_path), 1)
    for checkpoint in checkpoints_of(tmp_path):
        assert_whole(checkpoint, train_state.read_facts(checkpoint)["step"])
    save(tmp_path, step, keep_last=1)  # what was left behind is no obstacle
    assert_whole(latest_checkpoint(tmp_path), step)
    assert names_in(tmp_path) == [LATEST, f"step_{step}"]


def test_a_save_beside_the_training_holds_the_values_of_its_beginning_and_replaces_one_when_finished(tmp_path):
    values = tensors(1)
    pending = begin_save(tmp_path, 1, values, {}, beside_training=True)
    values["policy"]["block.weight"].fill_(7)
    assert latest_checkpoint(tmp_path) is None and pending.finish() == latest_checkpoint(tmp_path)
    assert_whole(tmp_path / "step_1", 1)
    begin_save(tmp_path, 1, values, {}).finish()
    assert tensors_of(tmp_path / "step_1")["policy.block.weight"].eq(7).all()


def test_a_removal_that_is_cut_short_leaves_no_checkpoint_and_is_completed_by_the_next_save(tmp_path, monkeypatch):
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(train_state, "remove", lambda path: None)
        save(tmp_path, 2, keep_last=1)
    assert checkpoints_of(tmp_path) == [tmp_path / "step_2"] and len(names_in(tmp_path)) == 3
    save(tmp_path, 3)
    assert names_in(tmp_path) == [LATEST, "step_2", "step_3"]


def test_what_cannot_be_written_or_finds_no_room_says_so_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    good = save(tmp_path, 1)
    said = rf"Cannot save '{tmp_path / 'step_2'}'.*Earlier checkpoints are intact"
    with limited(resource.RLIMIT_FSIZE, 256), pytest.raises(SaveError, match=said):  # files end as on a full disk
        save(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == good and names_in(tmp_path) == [LATEST, "step_1"]
    assert_whole(good, 1)
    size = sum(t.nbytes for group in tensors().values() for t in group.values())
    disk_usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk_usage(path)._replace(free=size - 1))
    monkeypatch.setattr(dcp, "save", lambda *_, **__: pytest.fail("nothing may be written"))
    with pytest.raises(SaveError, match=r"step_2': it needs .* GB, so nothing was written.* Make space or choose"):
        save(tmp_path, 2, keep_last=1)
    assert names_in(tmp_path) == [LATEST, "step_1"] and latest_checkpoint(tmp_path) == good


def test_a_save_whose_folder_is_gone_or_cannot_be_made_does_not_say_that_earlier_checkpoints_are_there(tmp_path):
    save(tmp_path / "run", 1)
    pending = begin_save(tmp_path / "run", 2, tensors(2), {})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(SaveError, match="No finished checkpoint is in that folder") as caught:
        pending.finish()
    assert "intact" not in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="Cannot save .*Not a directory.* GB are free there.* Once the cause is gone"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_an_interrupted_save_does_not_ask_for_space(tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    save(tmp_path, 1)
    monkeypatch.setattr(TensorWriter, "write_data", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SaveError, match="it was interrupted. Earlier checkpoints are intact. To go on") as caught:
            save(tmp_path, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "space" not in str(caught.value)


@pytest.mark.parametrize("name", [DATA, FACTS, MANIFEST])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_is_found_before_anything_is_read(tmp_path, name, damage):
    checkpoint = save(tmp_path, 1)
    verify_files(checkpoint)
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).unlink()
    if damage != "missing":
        (checkpoint / name).write_bytes(content[:-40] if damage == "truncated" else content[:-1] + b"\n")
    with pytest.raises(ValueError, match=f"'{checkpoint}' is " + (f"damaged: {name}" if name != MANIFEST else "")):
        verify_files(checkpoint)
    if name != FACTS and damage != "flipped":
        with pytest.raises(ValueError, match=rf"'{checkpoint}' is not a readable checkpoint: .*[^.]\. Copy it again"):
            load_tensors(checkpoint, tensors())


def test_a_file_that_the_manifest_does_not_have_and_facts_that_are_missing_or_of_a_newer_format_are_named(tmp_path):
    checkpoint = save(tmp_path, 1)
    (checkpoint / "lora").mkdir()
    (checkpoint / "lora" / "weights").touch()
    with pytest.raises(ValueError, match=f"'{checkpoint}' is damaged: lora/weights is not in its {MANIFEST}"):
        verify_files(checkpoint)
    (checkpoint / MANIFEST).write_text('{"files": {}, "tensors": {}}')
    with pytest.raises(ValueError, match=f"'{checkpoint}' is damaged: facts.json is not in its {MANIFEST}"):
        verify_files(checkpoint)
    facts = json.loads((checkpoint / FACTS).read_text())
    (checkpoint / FACTS).write_text(json.dumps(facts | {"format": 3}))
    with pytest.raises(ValueError, match=rf"'{checkpoint}'.*format 3; this version reads format 4"):
        train_state.read_facts(checkpoint)
    with pytest.raises(ValueError, match=rf"'{tmp_path}' is not a readable checkpoint.*step_N"):
        train_state.read_facts(tmp_path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *((make, "is not a readable") for make in (Path.mkdir, os.mkfifo, lost_link)),
        *((text, f"names '{text}'") for text in ("step_5", "", "../step_1")),
        ("\x1b[31m" + "x" * 10_000, r"names '\x1b[31m" + "x" * 75 + "', "),
    ],
)
def test_latest_that_is_no_name_is_not_taken_for_a_new_folder(tmp_path, make, said):
    save(tmp_path, 1)
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).write_text(make) if isinstance(make, str) else make(tmp_path / LATEST)
    found = r".*found \['step_1'\]. Pass one" if said.startswith("names") else " checkpoint"
    with pytest.raises(ValueError, match=re.escape(f"'{tmp_path / LATEST}' {said}") + found):
        train_state.read_facts(latest_checkpoint(tmp_path))


def test_a_tensor_that_was_not_saved_or_has_another_shape_or_precision_is_named(tmp_path):
    checkpoint = save(tmp_path, 1)
    require_dtypes(StoredTensors(checkpoint), tensors())
    for name, value in (("block.scale", torch.zeros(5)), ("block.weight", torch.zeros(5, 4))):
        wanted = tensors()
        wanted["policy"][name] = value
        with pytest.raises(ValueError, match=rf"Cannot restore.*{re.escape(name)}"):
            load_tensors(checkpoint, wanted)
    wanted["policy"]["block.weight"] = torch.zeros(5, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"policy block\.weight in torch\.float32, this run in torch\.bfloat16"):
        require_dtypes(StoredTensors(checkpoint), wanted)


def test_every_file_is_of_limited_size_and_on_the_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    synced, sync, replace = {}, os.fsync, os.replace

    def note(file: int) -> None:
        sync(file)
        synced[os.fstat(file).st_ino] = os.fstat(file).st_size

    def check(source: Path, target: Path) -> None:
        if Path(source).suffix == ".partial":
            files = [path.stat() for path in Path(source).iterdir()]
            assert files and all(synced.get(file.st_ino) == file.st_size for file in files)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    monkeypatch.setattr("hyvideo.checkpoint.tensors.FILE_BYTES", 100)
    checkpoint = save(tmp_path, 1)
    assert len(list(checkpoint.glob("*.safetensors"))) == 3
    assert_whole(checkpoint, 1)


@pytest.mark.parametrize("change", [{"num_layers": 1}, {"num_attention_heads": 4}], ids=["names", "shapes"])
def test_a_checkpoint_of_another_model_is_refused(trained, tiny_root, change):
    training = trained(max_steps=1)
    other = HunyuanVideo15Transformer3DModel.from_config({**load_transformer(tiny_root).config, **change})
    for checkpoint in (training.folder.checkpoints / "step_1", tiny_root):
        with pytest.raises(ValueError, match=f"'{checkpoint}'"):
            load_trained_policy(other, checkpoint)


@pytest.mark.parametrize("name", ["", "transformer"])
def test_a_checkpoint_of_the_original_script_is_refused_with_the_command_that_converts_it(tmp_path, name):
    (tmp_path / "checkpoint-7" / "transformer").mkdir(parents=True)
    (tmp_path / "checkpoint-7" / "transformer" / ".metadata").touch()
    with pytest.raises(ValueError, match="Convert it once: python -m scripts.convert_release_checkpoint"):
        check_checkpoint(tmp_path / "checkpoint-7" / name, ema=False)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Flip a bit, cut the end off, write a page of zeros, or append something."""
    place = chance.randrange(len(content))
    before, after = content[:place], content[place + 1 :]
    zeros = bytes(min(512, len(content) - place))
    flipped = before + bytes([content[place] ^ 1 << chance.randrange(8)]) + after
    longer = content + chance.randbytes(chance.randrange(1, 64))
    return chance.choice((flipped, before, before + zeros + content[place + 512 :], longer))


def load(checkpoints: Path) -> None:
    """Load as a resumed run does and compare with what was saved; a ValueError says that damage was found."""
    found = latest_checkpoint(checkpoints)
    assert found is not None and found.name in ("step_1", "step_2")
    facts = train_state.read_facts(found)
    verify_files(found)
    assert facts.items() >= {"round": facts["step"] * 2, "text": "ü"}.items()
    assert_whole(found, facts["step"])


def inject(checkpoint: Path, count: int) -> int:
    """Damage one file `count` times, restoring it after each; returns how often the damage was found."""
    chance, found = random.Random(0), 0
    files = [*sorted(path for path in checkpoint.iterdir() if path.is_file()), checkpoint.parent / "latest"]
    for number in range(count):
        path = files[number % len(files)]
        content = path.read_bytes()
        path.write_bytes(changed := damaged(content, chance))
        try:
            load(checkpoint.parent)
        except ValueError as error:
            found += 1
            assert str(checkpoint.parent) in str(error)
        else:
            assert changed == content or path.name in (MANIFEST, "latest"), f"damage {number}, of {path.name}, passed"
        path.write_bytes(content)
    load(checkpoint.parent)
    return found


@pytest.mark.parametrize(("count", "least"), [(60, 50), pytest.param(5000, 4000, marks=pytest.mark.slow)])
def test_whatever_happens_to_the_bytes_of_a_checkpoint_is_found_or_harmless(tmp_path, count, least):
    assert inject(save(tmp_path / "checkpoints", 1, 2), count) >= least
