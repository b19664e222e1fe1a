"""generate.py --cache, --compile and --attention_backend: what they change, and that the videos' notes say so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from generate import parse_arguments
from hyvideo.config.loading import load_config
from hyvideo.data.videos import read_video
from hyvideo.evaluation.generate import generate
from scripts.evaluate import main as evaluate
from tests.support.training import PROMPTS, flags_of, write_prompts

SMALL = {"num_inference_steps": 4, "fixed_size": "32x48", "video_length": 9, "guidance_scale": 3.0, "shift": 3.0}


@pytest.fixture
def sample(tiny_root: Path, tmp_path: Path) -> Callable[..., tuple[list[Tensor], dict[str, Any]]]:
    """Make videos of prompts in this process; returns them, and the note of the first."""

    def run(*prompts: str, **flags: object) -> tuple[list[Tensor], dict[str, Any]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        csv = write_prompts(folder / "prompts.csv", prompts)
        chosen = {"model_path": tiny_root, "prompts_csv": csv, "output_path": folder / "videos", **SMALL, **flags}
        generate(parse_arguments(flags_of(chosen)))
        videos = [read_video(path).float() for path in sorted((folder / "videos").glob("*.mp4"))]
        return videos, json.loads((folder / "videos" / "0000.json").read_text())

    return run


def test_a_cache_leaves_blocks_out_only_where_the_first_changes_little_and_begins_every_video_empty(sample, tmp_path):
    csv, last = tmp_path / "two.csv", tmp_path / "last.csv"
    csv.write_text(f'prompt,seed\n{PROMPTS[0]},7\n"{PROMPTS[3]}",8\n')
    last.write_text(f'prompt,seed\n"{PROMPTS[3]}",8\n')
    (plain, _), note = sample(prompts_csv=csv)
    assert not {"cache", "compile", "attention_backend"} & {*note}
    (strict, _), note = sample(prompts_csv=csv, cache=1e-9)
    assert torch.equal(strict, plain) and note["cache"] == 1e-9
    (cached, after), _ = sample(prompts_csv=csv, cache=1e9)
    assert not torch.equal(cached, plain) and torch.equal(after, sample(prompts_csv=last, cache=1e9)[0][0])


@pytest.mark.parametrize(("flag", "value"), [("attention_backend", "_native_math"), ("compile", True)])
def test_other_attention_and_compiled_blocks_change_rounding_alone_and_are_noted(sample, flag: str, value: object):
    (plain,), _ = sample(PROMPTS[1])
    (changed,), note = sample(PROMPTS[1], **{flag: value})
    assert note[flag] == value
    assert (changed - plain).abs().max() <= 2  # grey levels of 255


def test_neither_training_nor_a_measurement_takes_what_is_inexact(tmp_path: Path, tiny_root: Path, capsys):
    with pytest.raises(ValueError, match="unknown flag '--cache'; only generate.py takes it, for a replay must repeat"):
        load_config(["--cache"])
    with pytest.raises(ValueError, match="'--compile'; here it is called --enable_compile"):
        load_config(["--compile"])
    csv = write_prompts(tmp_path / "prompts.csv")
    given = ["--prompts_csv", str(csv), "--model", "base", str(tiny_root), "--output_dir", str(tmp_path / "out")]
    assert evaluate([*given, "--cache", "0.2"]) == 2
    assert "--cache: its videos are an approximation" in capsys.readouterr().err
