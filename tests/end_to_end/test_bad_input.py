"""Bad input costs nothing: exit status 2, a message that says what is wrong, no traceback and no file left behind.

At least one case of each part that refuses input; its other cases are in the unit tests of that part.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_folders import contents
from tests.support.training import arguments


def truncated_weights(folder: Path) -> dict[str, Any]:
    shutil.copytree(folder.parent / "model", folder / "copy")
    path = folder / "copy" / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return {"pretrained_model_root": "copy"}


CASES: dict[str, tuple[dict[str, Any] | Callable[[Path], dict[str, Any]], str]] = {
    "unknown flag": ({"learning_rte": 1}, "unknown flag '--learning_rte'; the nearest is --learning_rate"),
    "unknown metric": ({"reward_weights": '{"XX": 1}'}, "has no metric XX; expected some of VQ, MQ, TA"),
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
    assert finished.returncode == 2, finished.stderr
    assert finished.stderr.startswith("post_train.py: ") and message in finished.stderr
    assert "Traceback" not in finished.stderr and finished.stdout == "" and contents(folder) == before
