"""A checkpoint made to run code, to read other files or to exhaust the memory is refused before anything happens."""

import io
import json
import os
import pickle
import pickletools
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from imageio_ffmpeg import get_ffmpeg_exe
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from hyvideo.checkpoint import plain_pickle, tensor_index
from hyvideo.checkpoint.plain_pickle import read_pickle
from hyvideo.checkpoint.tensor_index import ALLOWED, INDEX, PICKLED_INDEX
from hyvideo.checkpoint.tensor_reader import TensorReader, read_tensor
from hyvideo.checkpoint.train_state import begin_save, load_tensors, one_process, require_dtypes
from hyvideo.checkpoint.trained_policy import OriginalCheckpoint


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self._folder),)


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    return {"policy": {"weight": torch.arange(6.0).view(2, 3)}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What PyTorch writes, and this project's first versions did: the index is a pickle."""
    with one_process():
        dcp.save(tensors(), checkpoint_id=tmp_path / "step_1", no_dist=True)
    return tmp_path / "step_1"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return begin_save(tmp_path / "checkpoints", 1, tensors(), {}).finish()


def change_index(checkpoint: Path, change: Callable[[Metadata], object]) -> None:
    """Read the index as its maker can, change it and write it back."""
    index = pickle.loads((checkpoint / PICKLED_INDEX).read_bytes())
    change(index)
    (checkpoint / PICKLED_INDEX).write_bytes(pickle.dumps(index))


def test_what_we_write_holds_no_pickled_index_and_either_index_is_read(ours: Path, checkpoint: Path):
    assert sorted(path.name for path in ours.iterdir()) == ["__0_0.distcp", "facts.json", INDEX, "manifest.json"]
    for folder in (ours, checkpoint):
        received = {"policy": {"weight": torch.zeros(2, 3)}}
        load_tensors(folder, received)
        assert torch.equal(received["policy"]["weight"], tensors()["policy"]["weight"])


@pytest.mark.parametrize("place", ["planner_data", "storage_meta.modules", "state_dict_metadata.x"])
def test_code_in_the_index_is_not_run(checkpoint: Path, tmp_path: Path, place: str):
    def plant(index: Metadata) -> None:
        if place == "planner_data":
            index.planner_data = {"a": Hostile(tmp_path / "owned")}
        elif place == "storage_meta.modules":
            index.storage_meta.modules = [Hostile(tmp_path / "owned")]
        else:
            index.state_dict_metadata["x"] = Hostile(tmp_path / "owned")

    change_index(checkpoint, plant)
    for read in (
        lambda: load_tensors(checkpoint, tensors()),
        lambda: require_dtypes(checkpoint, tensors()),
        lambda: OriginalCheckpoint(checkpoint),
    ):
        with pytest.raises(ValueError, match=r"refers to posix\.mkdir, which no checkpoint needs"):
            read()
    assert not (tmp_path / "owned").exists()
    pickle.loads((checkpoint / PICKLED_INDEX).read_bytes())
    assert (tmp_path / "owned").exists()  # the attack is a real one


def changing_paths(**attributes: object) -> bytes:
    """Return operations of a pickle that set attributes of the class `PosixPath`, by allowed names alone."""
    state = pickletools.optimize(pickle.dumps((None, attributes), 2))  # leaves the memo to what follows
    return b"cpathlib\nPosixPath\n" + state[2:-1] + b"b0"


UNPICKLE_ALLOWED = """
import pickle, shutil, sys
import torch.distributed.checkpoint
from pathlib import Path
class Careful(pickle.Unpickler):
    def find_class(self, module, name):
        assert name in ALLOWED[module]
        return super().find_class(module, name)
ALLOWED = {allowed!r}
with open(sys.argv[1], "rb") as file:
    Careful(file).load()
{then}
"""


@pytest.mark.parametrize("attack", ["leave the folder", "run a program", "delete a folder"])
def test_an_index_cannot_change_a_class(checkpoint: Path, tmp_path: Path, attack: str):
    """With a list of allowed names alone, `PosixPath` would be another class for the whole program."""
    victim = tmp_path / "victim"
    victim.mkdir()
    changes, then, said = {
        "leave the folder": ({"name": "../victim"}, "print(Path('../victim').name == '../victim')", "True"),
        "run a program": (
            {"parent": PosixPath(checkpoint)},
            "from imageio_ffmpeg import get_ffmpeg_exe; print(Path(get_ffmpeg_exe()))",
            str(checkpoint),
        ),
        "delete a folder": (
            {"_str": str(victim), "exists": torch.Size},
            "shutil.rmtree(Path('new.partial')); print(bool(Path('new').exists()))",
            "False",
        ),
    }[attack]
    index = checkpoint / PICKLED_INDEX
    index.write_bytes(changing_paths(**changes) + index.read_bytes())
    before = dict(vars(PosixPath))
    for read in (lambda: load_tensors(checkpoint, {"policy": {}}, alone=True), lambda: OriginalCheckpoint(checkpoint)):
        with pytest.raises(ValueError, match=r"changes pathlib\.PosixPath, which no checkpoint needs"):
            read()
    assert dict(vars(PosixPath)) == before
    if attack == "run a program":
        program = checkpoint / Path(get_ffmpeg_exe()).name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    script = UNPICKLE_ALLOWED.format(allowed=ALLOWED, then=then)
    done = subprocess.run([sys.executable, "-c", script, index], capture_output=True, text=True, check=True, env={})
    assert said in done.stdout  # the attack is a real one
    assert victim.exists() == (attack != "delete a folder")


def test_a_pickle_that_says_little_many_times_costs_little(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    doubled = b"\x80\x02)" + b"q\x00h\x00\x86" * 1000  # a tuple of itself twice, and so on: 2^1000 leaves
    assert isinstance(read_pickle(doubled + b".", ALLOWED, "it"), tuple)
    nested = b"\x80\x02)" + b"\x85" * 10**6
    for shape in (doubled, nested):
        with pytest.raises(ValueError, match="by a key that is no text"):
            read_pickle(b"\x80\x02}" + shape[2:] + b"Ns.", ALLOWED, "it")
        (checkpoint / PICKLED_INDEX).write_bytes(shape + b".")
        with pytest.raises(ValueError, match="is not the index"):
            TensorReader(checkpoint).read_metadata()
    monkeypatch.setattr(plain_pickle, "MAX_OPERATIONS", 10**5)
    with pytest.raises(ValueError, match="it has more than 100,000 operations"):
        read_pickle(nested + b".", ALLOWED, "it")


def test_one_part_of_many_tensors_is_counted_for_each(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    def repeat(index: Metadata) -> None:
        entry = index.state_dict_metadata["policy.weight"]
        entry.chunks *= 100
        index.state_dict_metadata |= {"policy.weight": entry, **dict.fromkeys(map(str, range(100)), entry)}

    change_index(checkpoint, repeat)
    assert (checkpoint / PICKLED_INDEX).stat().st_size < 5000  # for 10,100 parts
    monkeypatch.setattr(tensor_index, "MAX_PARTS", 99)
    with pytest.raises(ValueError, match="it has more than 99 parts of tensors"):
        TensorReader(checkpoint).read_metadata()


def test_a_pickle_in_a_tensors_place_is_not_read(checkpoint: Path, tmp_path: Path):
    (data,) = checkpoint.glob("*.distcp")
    content = io.BytesIO()
    torch.save(Hostile(tmp_path / "owned"), content)
    data.write_bytes(content.getvalue())

    def plant(index: Metadata) -> None:
        (info,) = index.storage_data.values()
        info.offset, info.length = 0, len(content.getvalue())

    change_index(checkpoint, plant)
    with pytest.raises(ValueError, match=r"refers to posix\.mkdir, which no checkpoint needs"):
        load_tensors(checkpoint, tensors())

    def hide(index: Metadata) -> None:
        index.state_dict_metadata["policy.weight"] = BytesStorageMetadata()

    change_index(checkpoint, hide)
    with pytest.raises(ValueError, match=r"policy\.weight"):
        load_tensors(checkpoint, tensors())
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["../other.distcp", "/etc/hostname", "a/b", ".", ""])
def test_files_outside_of_the_folder_are_not_read(checkpoint: Path, ours: Path, name: str):
    def plant(index: Metadata) -> None:
        (info,) = index.storage_data.values()
        info.relative_path = name

    change_index(checkpoint, plant)
    (ours / INDEX).write_text((ours / INDEX).read_text().replace("__0_0.distcp", name))
    for folder in (checkpoint, ours):
        with pytest.raises(ValueError, match="made to read other files"):
            load_tensors(folder, tensors())


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"garbage", pickle.dumps([1]), pickle.dumps(None)])
def test_an_index_that_is_none_is_named(checkpoint: Path, content: bytes):
    (checkpoint / PICKLED_INDEX).write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata' is "):
        TensorReader(checkpoint).read_metadata()


@pytest.mark.parametrize(
    "damage",
    [
        lambda index, info, entry: delattr(info, "relative_path"),
        lambda index, info, entry: setattr(info, "relative_path", ("a",)),
        lambda index, info, entry: setattr(info, "offset", None),
        lambda index, info, entry: setattr(info, "offset", -1),
        lambda index, info, entry: delattr(entry, "properties"),
        lambda index, info, entry: setattr(entry.properties, "dtype", Metadata),
        lambda index, info, entry: setattr(entry, "size", [2, 3]),
        lambda index, info, entry: setattr(entry, "size", torch.Size([1] * 65)),
        lambda index, info, entry: setattr(entry, "chunks", [None]),
        lambda index, info, entry: setattr(index, "storage_data", {}),
        lambda index, info, entry: setattr(index, "state_dict_metadata", []),
    ],
)
def test_an_index_with_a_field_lost_or_of_another_type_is_refused(checkpoint: Path, damage: Callable):
    def change(index: Metadata) -> None:
        (info,) = index.storage_data.values()
        damage(index, info, index.state_dict_metadata["policy.weight"])

    change_index(checkpoint, change)
    for read in (TensorReader(checkpoint).read_metadata, lambda: OriginalCheckpoint(checkpoint)):
        with pytest.raises(ValueError, match=r"\.metadata' is not the index of a distributed checkpoint"):
            read()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"shape":[2,3]', '"shape":[2,1000000000000000]', "of float32 in .* bytes|part .* of a tensor"),
        ('"shape":[2,3],"parts"', '"shape":[2,1000000000000000],"parts"', "do not make it up"),
        ('"offsets":[0,0]', '"offsets":[0,1]', r"a part \(2, 3\) at \(0, 1\) of a tensor \(2, 3\)"),
        ('"offsets":[0,0]', '"offsets":[0]', "a part"),
        ('"start":0', '"start":9', r"bytes at 9 of __0_0\.distcp"),
        ('"length":', '"length":1', r"bytes at 0 of __0_0\.distcp"),
        ('"dtype":"float32"', '"dtype":"manual_seed"', "there is no dtype"),
        ('"start":0', '"start":-1', "greater than or equal to 0"),
        ('"start":0', '"start":"0"', "valid integer"),
        ('"start":0', '"start":0,"run":"ls"', "run: Unexpected"),
        ("__0_0.distcp", "lost.distcp", "names 'lost.distcp', but there is no such file"),
    ],
)
def test_an_index_that_its_files_cannot_bear_out_is_refused(ours: Path, old: str, new: str, said: str):
    content = (ours / INDEX).read_text()
    assert old in content
    (ours / INDEX).write_text(content.replace(old, new))
    with pytest.raises(ValueError, match=f"{INDEX}'.*({said})"):
        TensorReader(ours).read_metadata()


Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def with_parts(checkpoint: Path, boxes: Boxes) -> None:
    """Let the index say that the tensor is made up of these parts: (offsets, shape)."""
    index = json.loads((checkpoint / INDEX).read_text())
    tensor = index["tensors"]["policy.weight"]
    parts = [tensor["parts"][0] | {"offsets": offsets, "shape": shape} for offsets, shape in boxes]
    tensor["parts"] = [part | {"start": 0, "length": 4 * prod(part["shape"])} for part in parts]
    (checkpoint / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        ([((0, 0), (1, 3)), ((1, 0), (1, 3))], True),
        ([((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 1), (1, 1)), ((1, 2), (1, 1))], True),
        ([((0, 0), (2, 3)), ((1, 0), (0, 3)), ((2, 0), (0, 3)), ((2, 0), (0, 3))], True),
        ([((0, 0), (1, 3)), ((0, 0), (1, 3))], False),
        ([((0, 0), (2, 2)), ((0, 1), (1, 2))], False),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], False),
        ([((0, 0), (2, 2)), ((1, 1), (1, 2))], False),
        ([((0, 0), (1, 3))], False),
        ([], False),
    ],
    ids=["rows", "boxes", "empty ones", "one twice", "overlap", "the whole twice", "corner", "half", "none"],
)
def test_parts_must_cover_every_element_of_a_tensor_once(ours: Path, boxes: Boxes, whole: bool):
    with_parts(ours, boxes)
    if whole:
        TensorReader(ours).read_metadata()
        return
    with pytest.raises(ValueError, match="the parts of policy.weight do not make it up"):
        TensorReader(ours).read_metadata()


def test_many_parts_are_compared_in_little_time(ours: Path):
    with_parts(ours, [((row, column), (1, 1)) for row in range(2) for column in range(3)] * 20_000)
    started = time.monotonic()
    with pytest.raises(ValueError, match="do not make it up"):
        TensorReader(ours).read_metadata()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", [PICKLED_INDEX, "__0_0.distcp"])
def test_what_never_ends_is_not_read(checkpoint: Path, name: str, kind: str):
    (checkpoint / name).unlink()
    if kind == "folder":
        (checkpoint / name).mkdir()
    else:
        os.mkfifo(checkpoint / name) if kind == "pipe" else (checkpoint / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"there is no (such )?file|it is a pipe, socket or device|Is a directory"):
        load_tensors(checkpoint, tensors())


def zipped(**entries: bytes) -> bytes:
    """Return a zip of what `torch.save` writes, with entries replaced."""
    saved, content = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(3), saved)
    with zipfile.ZipFile(saved) as whole, zipfile.ZipFile(content, "w") as archive:
        for name in ("data.pkl", "data/0", "byteorder"):
            archive.writestr(f"archive/{name}", entries.get(name, whole.read(f"archive/{name}")))
    return content.getvalue()


def compressed() -> bytes:
    """Return a zip whose entries unpack to a thousand times its bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"")
        archive.writestr("archive/data/0", bytes(2**24))
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (zipped(), None),
        (compressed(), "it is compressed"),
        (zipped(**{"data/0": bytes(2**10)}), r"\(3,\) of torch.float32 in 1024 bytes"),
        (zipped(**{"data.pkl": bytes(2**21)}), "its entries are too large"),
        (zipped(**{"data.pkl": pickle.dumps(3)}), "it describes none"),
        (zipped(byteorder=b"big"), "in the other order"),
        (zipped()[:-30], "not a zip"),
        (zipped().replace(bytes(12), b"\1" + bytes(11), 1), "Bad CRC-32"),
        (b"", "not a zip"),
        (pickle.dumps(torch.zeros(3)), "not a zip"),
    ],
    ids=["whole", "compressed", "larger", "long description", "number", "order", "cut", "changed", "empty", "pickle"],
)
def test_what_is_no_tensor_is_not_read(tmp_path: Path, content: bytes, said: str | None):
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"before" + content + b"after")
    if said is None:
        assert torch.equal(read_tensor(path, 6, len(content)), torch.zeros(3))
        return
    with pytest.raises(ValueError, match=f"'{path}' at 6 is no tensor that can be read: .*{said}"):
        read_tensor(path, 6, len(content))


def test_every_dtype_and_values_beside_tensors_of_an_honest_checkpoint_pass(tmp_path: Path):
    names = "float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
    dtypes = [getattr(torch, name) for name in (*names.split(), "uint32")]
    values = {str(dtype): torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype) for dtype in dtypes}
    values |= {"turned": torch.randn(3, 5).t(), "number": torch.tensor(3.0), "nothing": torch.zeros(0, 4)}
    values |= {"window": torch.randn(9, 9)[2:5, 3:7], "row": torch.zeros(1).expand(7)}
    with one_process():
        dcp.save({"model": values, "steps": 3, "groups": [{"lr": 0.1}]}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = OriginalCheckpoint(tmp_path)
    assert set(checkpoint.shapes) == set(values)
    for name, value in values.items():
        received = checkpoint.read(name, None)
        assert received.dtype == value.dtype
        assert torch.equal(received.double(), value.double())
