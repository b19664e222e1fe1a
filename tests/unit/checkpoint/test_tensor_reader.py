"""A checkpoint made to run code or to read other files is refused before anything of it happens."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from hyvideo.checkpoint.original_checkpoint import OriginalCheckpoint
from hyvideo.checkpoint.tensor_reader import TensorReader
from hyvideo.checkpoint.train_state import begin_save, load_tensors, one_process, require_dtypes


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
    return begin_save(tmp_path / "checkpoints", 1, tensors(), {}).finish()


def change_index(checkpoint: Path, change: Callable[[Metadata], object]) -> None:
    """Read the index as its maker can, change it and write it back."""
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(index)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


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
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert (tmp_path / "owned").exists()  # the attack is a real one


def test_a_pickle_in_a_tensors_place_is_not_read(checkpoint: Path, tmp_path: Path):
    (data,) = checkpoint.glob("*.distcp")
    content = io.BytesIO()
    torch.save(Hostile(tmp_path / "owned"), content)
    data.write_bytes(content.getvalue())

    def plant(index: Metadata) -> None:
        index.state_dict_metadata["policy.weight"] = BytesStorageMetadata()
        (info,) = index.storage_data.values()
        info.offset, info.length = 0, len(content.getvalue())

    change_index(checkpoint, plant)
    with pytest.raises(ValueError, match=r"policy\.weight"):
        load_tensors(checkpoint, tensors())
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["../other.distcp", "/etc/hostname", "a/b", "."])
def test_files_outside_of_the_folder_are_not_read(checkpoint: Path, name: str):
    def plant(index: Metadata) -> None:
        (info,) = index.storage_data.values()
        info.relative_path = name

    change_index(checkpoint, plant)
    with pytest.raises(ValueError, match="made to read other files"):
        load_tensors(checkpoint, tensors())


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"garbage", pickle.dumps([1]), pickle.dumps(None)])
def test_an_index_that_is_none_is_named(checkpoint: Path, content: bytes):
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata' is "):
        TensorReader(checkpoint).read_metadata()


@pytest.mark.parametrize(
    "damage",
    [
        lambda index, info, entry: delattr(info, "relative_path"),
        lambda index, info, entry: setattr(info, "relative_path", ("a",)),
        lambda index, info, entry: setattr(info, "offset", None),
        lambda index, info, entry: delattr(entry, "properties"),
        lambda index, info, entry: setattr(entry.properties, "dtype", Metadata),
        lambda index, info, entry: setattr(entry, "size", [2, 3]),
        lambda index, info, entry: setattr(entry, "chunks", [None]),
        lambda index, info, entry: setattr(index, "storage_meta", None),
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


def test_every_dtype_and_values_beside_tensors_of_an_honest_checkpoint_pass(tmp_path: Path):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)
    content = {"model": {str(dtype): torch.ones(2).to(dtype) for dtype in dtypes}, "steps": 3, "groups": [{"lr": 0.1}]}
    with one_process():
        dcp.save(content, checkpoint_id=tmp_path, no_dist=True)
    assert set(OriginalCheckpoint(tmp_path).shapes) == {str(dtype) for dtype in dtypes}
