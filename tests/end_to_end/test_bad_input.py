"""Bad input costs nothing: exit status 2, a message that says what is wrong, no traceback and no file left behind."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyvideo.checkpoint.train_state import begin_save
from tests.support.command_line import CommandLine
from tests.support.training import arguments


def csv(content: str) -> Callable[[Path], dict[str, Any]]:
    """A case whose training prompts are a file with this content."""

    def prepare(folder: Path) -> dict[str, Any]:
        (folder / "given.csv").write_text(content)
        return {"train_video_csv": "given.csv"}

    return prepare


def used_folder(folder: Path) -> dict[str, Any]:
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    return {}


def file_as_folder(folder: Path) -> dict[str, Any]:
    (folder / "run").touch()
    return {}


def garbage_checkpoint(folder: Path) -> dict[str, Any]:
    (folder / "step_5").mkdir()
    (folder / "step_5" / "facts.json").write_text("garbage")
    return {"resume_from_checkpoint": "step_5"}


def foreign_checkpoint(folder: Path) -> dict[str, Any]:
    tensors = {"policy": {"weight": torch.zeros(2)}}
    begin_save(folder, 5, tensors, {"config_hash": "0123456789abcdef"}).finish()
    return {"resume_from_checkpoint": "step_5"}


def incomplete_weights(folder: Path) -> dict[str, Any]:
    shutil.copytree(folder.parent / "model", folder / "copy")
    shutil.rmtree(folder / "copy" / "vae")
    return {"pretrained_model_root": "copy"}


def truncated_weights(folder: Path) -> dict[str, Any]:
    shutil.copytree(folder.parent / "model", folder / "copy")
    path = folder / "copy" / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return {"pretrained_model_root": "copy"}


CASES: dict[str, tuple[dict[str, Any] | Callable[[Path], dict[str, Any]], str]] = {
    "missing CSV": ({"train_video_csv": "nowhere.csv"}, "train_video_csv: there is no file 'nowhere.csv'"),
    "empty CSV": (csv(""), "given.csv: no prompts; expected a header line with `prompt`"),
    "CSV with a header only": (csv("prompt\n"), "given.csv: no prompts"),
    "no prompt column": (csv("text,seed\na red circle,1\n"), "given.csv, line 1: there is no `prompt` column"),
    "an image outside of its folder": (
        lambda folder: csv("prompt,ref_image_path\na cat,../model/model_index.json\n")(folder) | {"image_root": folder},
        "given.csv, line 2: ref_image_path",
    ),
    "odd size": ({"rollout_size": "30x32"}, "rollout_size is 30x32, but height and width must be multiples of 16"),
    "no size": ({"rollout_size": "large"}, "a size is HEIGHTxWIDTH in pixels, such as 352x624; received 'large'"),
    "frames": ({"sample_n_frames": 6}, "sample_n_frames is 6, but must be 4n + 1: use 5 or 9"),
    "unknown flag": ({"learning_rte": 1}, "unknown flag '--learning_rte'; the nearest is --learning_rate"),
    "unknown sde_type": (
        {"sde_type": "sage"},
        "expected one of sage_grpo, flow_grpo, dance_grpo, cps; received 'sage'",
    ),
    "not a number": ({"eta": "much"}, "--eta: expected a number; received 'much'"),
    "missing config": ({"config": "nowhere.yaml"}, "config file 'nowhere.yaml' cannot be read"),
    "groups that do not tile": ({"batch_size": 3}, "batch_size 3 and num_generations 2 must divide one another"),
    "a floor above a lowered ceiling": (
        {"kl_schedule": "milder", "kl_weight": 0.01, "kl_min_coef": 0.005},
        "min_coef (kl_min_coef) must lie within [0, 0.001] for 'milder', got 0.005",
    ),
    "unknown reward": ({"reward_model": "moving_shape"}, "Nearest: moving_shapes"),
    "unknown metric": ({"reward_weights": '{"XX": 1}'}, "has no metric XX; expected some of VQ, MQ, TA"),
    "used run folder": (used_folder, "'run' already holds a run (metrics.jsonl)"),
    "a file as run folder": (file_as_folder, "output_dir: 'run' is a file"),
    "missing checkpoint": ({"resume_from_checkpoint": "step_9"}, "there is no checkpoint 'step_9'"),
    "garbage checkpoint": (garbage_checkpoint, "'step_5' is not a readable checkpoint"),
    "a checkpoint of other settings": (foreign_checkpoint, "'step_5' was made with other settings"),
    "missing weights": ({"pretrained_model_root": "nowhere"}, "weights are missing"),
    "incomplete weights": (incomplete_weights, "'copy' lacks vae"),
    "truncated weights": (truncated_weights, "Cannot read 'copy/transformer/"),
    "missing adapter": ({"use_lora": True, "pretrained_lora_path": "nowhere"}, "there is no folder 'nowhere'"),
}


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Every file with its content, and every folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("case", "message"), CASES.values(), ids=CASES)
def test_bad_input_is_named_and_leaves_nothing(
    command_line: CommandLine, tiny_root: Path, prompts_csv: Path, case: Any, message: str
):
    folder = command_line.folder
    (folder.parent / "model").symlink_to(tiny_root)
    settings = case(folder) if callable(case) else case
    before = contents(folder)
    argv = arguments(tiny_root, prompts_csv, Path("run"), **settings)

    finished = command_line.run("post_train.py", argv)
    assert finished.status == 2, finished.stderr
    assert finished.stderr.startswith("post_train.py: ")
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""
    assert contents(folder) == before
