"""A checkpoint of the original script becomes a transformer folder, and its pickle calls and changes nothing."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hyvideo.models.loading import load_transformer
from scripts.convert_release_checkpoint import main, release_tensors
from tests.support.equal_runs import assert_same
from tests.support.original_layout import original_transformer_tensors
from tests.support.tiny_model import build_transformer


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    dcp.save({"model": tensors, "step": 3}, checkpoint_id=folder / "transformer", no_dist=True)
    return folder / "transformer" / ".metadata"


def test_it_becomes_a_transformer_of_the_original_layout(original_root: Path, tmp_path: Path, capsys):
    trained = build_transformer(99, num_refiner_layers=2, target_size=640)
    tensors = original_transformer_tensors(trained.state_dict())
    tensors["double_blocks.0.img_attn_q.base_layer.weight"] = tensors.pop("double_blocks.0.img_attn_q.weight")
    tensors["double_blocks.0.img_attn_q.lora_A.default.weight"] = torch.ones(2, 32)
    saved(tmp_path / "checkpoint-7", tensors)
    config, output = original_root / "transformer" / "480p_t2v" / "config.json", tmp_path / "transformer" / "mine"
    argv = ["--config", str(config), "--output_path", str(output)]
    assert main([str(tmp_path / "checkpoint-7" / "transformer"), *argv]) == 0
    assert f"--lora_path {tmp_path / 'checkpoint-7' / 'lora' / 'default'}" in capsys.readouterr().out
    assert_same(load_transformer(tmp_path, "mine").state_dict(), trained.state_dict())


class Hostile:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self._folder),)


def test_its_pickle_runs_nothing_and_changes_no_class(tmp_path: Path):
    index = saved(tmp_path, {"w": torch.ones(2, 3)})
    honest, before = index.read_bytes(), dict(vars(type(tmp_path)))
    assert release_tensors(index.parent)[0].keys() == {"w"}
    changing = b"cpathlib\nPosixPath\n(N}X\x04\x00\x00\x00nameK\x01stb0" + honest  # BUILD on a class that is known
    for content in (pickle.dumps(Hostile(tmp_path / "owned")), changing, honest[:100], b"", pickle.dumps(3)):
        index.write_bytes(content)
        try:
            release_tensors(index.parent)
        except ValueError as error:
            assert f"'{index.parent}' cannot be converted" in str(error)
        else:
            assert content == changing
    assert dict(vars(type(tmp_path))) == before and not (tmp_path / "owned").exists()


def test_a_lost_part_and_a_file_elsewhere_are_refused(tmp_path: Path):
    index = saved(tmp_path, {"w": torch.ones(2, 3)})
    honest = index.read_bytes()
    metadata = pickle.loads(honest)
    (place,) = [place for key, place in metadata.storage_data.items() if key.fqn == "model.w"]
    place.relative_path = "../secret"
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="lies outside"):
        release_tensors(index.parent)
    metadata = pickle.loads(honest)
    metadata.state_dict_metadata["model.w"].size = torch.Size([9, 3])
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="not there as a whole"):
        release_tensors(index.parent)
