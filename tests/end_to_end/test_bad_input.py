"""Bad input costs nothing: exit status 2, a message that says what is wrong, no traceback and no file left behind.

At least one case of each part that refuses input; its other cases are in the unit tests of that part.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyvideo.checkpoint.train_state import begin_save
from tests.support.run_folders import contents
from tests.support.training import arguments


def image_outside(folder: Path) -> dict[str, Any]:
    (folder / "given.csv").write_text("prompt,ref_image_path\na cat,../model/model_index.json\n")
    return {"train_video_csv": "given.csv", "image_root": folder}


def used_folder(folder: Path) -> dict[str, Any]:
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    return {}


def foreign_checkpoint(folder: Path) -> dict[str, Any]:
    tensors = {"policy": {"weight": torch.zeros(2)}}
    begin_save(folder, 5, tensors, {"settings": {"eta": 0.9}}).finish()
    return {"resume_from_checkpoint": "step_5"}


def truncated_weights(folder: Path) -> dict[str, Any]:
    shutil.copytree(folder.parent / "model", folder / "copy")
    path = folder / "copy" / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return {"pretrained_model_root": "copy"}


CASES: dict[str, tuple[dict[str, Any] | Callable[[Path], dict[str, Any]], str]] = {
    "unknown flag": ({"learning_rte": 1}, "unknown flag '--learning_rte'; the nearest is --learning_rate"),
    "groups that do not tile": ({"batch_size": 3}, "batch_size 3 and num_generations 2 must divide one another"),
    "an image outside of its folder": (image_outside, "given.csv, line 2: ref_image_path"),
    "unknown metric": ({"reward_weights": '{"XX": 1}'}, "has no metric XX; expected some of VQ, MQ, TA"),
    "used run folder": (used_folder, "'run' already holds a run (metrics.jsonl)"),
    "a checkpoint of other settings": (foreign_checkpoint, "'step_5' was made with other settings"),
    "missing weights": ({"pretrained_model_root": "nowhere"}, "weights are missing"),
    "truncated weights": (truncated_weights, "Cannot read 'copy/transformer/"),
}


@pytest.mark.parametrize(("case", "message"), CASES.values(), ids=CASES)
def test_bad_input_is_named_and_leaves_nothing(command_line, tiny_root, prompts_csv, case, message):
    folder = command_line.folder
    (folder.parent / "model").symlink_to(tiny_root)
    settings = case(folder) if callable(case) else case
    before = contents(folder)
    argv = arguments(tiny_root, prompts_csv, Path("run"), **settings)

    finished = command_line.run("post_train.py", argv)
    assert finished.status == 2, finished.stderr
    assert finished.stderr.startswith("post_train.py: ") and message in finished.stderr
    assert "Traceback" not in finished.stderr and finished.stdout == "" and contents(folder) == before
