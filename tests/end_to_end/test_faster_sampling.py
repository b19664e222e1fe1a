"""generate.py --cache, --compile, --attention_backend and --offload group: what they change, and what notes say."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from generate import parse_arguments
from hyvideo.config.loading import load_config
from hyvideo.data.videos import read_video
from hyvideo.evaluation import generate as sampling
from scripts.evaluate import main as evaluate
from tests.support.original_layout import save_super_resolution
from tests.support.training import PROMPTS, flags_of, noisy_image, write_prompts

SMALL = {"num_inference_steps": 4, "fixed_size": "32x48", "video_length": 9, "guidance_scale": 3.0, "shift": 3.0}


@pytest.fixture
def sample(tiny_root: Path, tmp_path: Path) -> Callable[..., tuple[list[Tensor], dict[str, Any]]]:
    """Make videos of prompts in this process; returns them, and the note of the first."""

    def run(*prompts: str, **flags: object) -> tuple[list[Tensor], dict[str, Any]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        csv = write_prompts(folder / "prompts.csv", prompts)
        chosen = {"model_path": tiny_root, "prompts_csv": csv, "output_path": folder / "videos", **SMALL, **flags}
        sampling.generate(parse_arguments(flags_of(chosen)))
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


@pytest.mark.parametrize(
    ("flag", "value"),
    [("attention_backend", "_native_math"), pytest.param("compile", True, marks=pytest.mark.slow)],
)
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


@pytest.fixture
def offload_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool | str], None]:
    """Offload on a CPU, where blocks do not move: all that is left out is the check that there is a GPU."""
    check = sampling.request_of

    def choose(offload: bool | str) -> None:
        def without_a_gpu(arguments: Namespace) -> sampling.Request:
            request = check(arguments)
            request.arguments.offload = offload
            return request

        monkeypatch.setattr(sampling, "request_of", without_a_gpu)

    return choose


@pytest.mark.parametrize("task", ["t2v", pytest.param("i2v", marks=pytest.mark.slow)])
def test_videos_sharpened_videos_and_their_notes_are_the_same(original_root, tmp_path, monkeypatch, offload_as, task):
    root = shutil.copytree(original_root, tmp_path / "ckpts")
    save_super_resolution(root)
    noisy_image(0, (64, 64)).save(tmp_path / "image.png")
    flags = {"model_path": root, "transformer_version": f"480p_{task}", "prompt": 'a cat with the sign "cat"'}
    flags |= {"fixed_size": "640x640", "video_length": 1, "num_inference_steps": 2, "guidance_scale": 3.0}
    flags |= {"sr": "true", "sr_num_inference_steps": 1, "save_pre_sr_video": "true"}
    flags |= {"image_path": tmp_path / "image.png"} if task == "i2v" else {}
    notes, placed, offload_blocks = [], [], sampling.offload_blocks

    def noted(network: torch.nn.Module, device: torch.device, **how: bool) -> None:
        placed.append(type(network).__name__)
        offload_blocks(network, device, **how)

    monkeypatch.setattr(sampling, "offload_blocks", noted)
    for name, offload in (("whole", False), ("group", "group")):
        offload_as(offload)
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        sampling.generate(parse_arguments(flags_of(flags | {"output_path": "a.mp4"})))
        notes.append(json.loads((folder / "a.json").read_text()))
    assert notes[0] == notes[1]
    assert placed.count("HunyuanVideo15Transformer3DModel") == 2 and "Qwen2_5_VLTextModel" in placed
    for name in ("a.mp4", "a_before_sr.mp4"):
        assert torch.equal(*(read_video(tmp_path / part / name) for part in ("whole", "group")))


def test_a_cache_is_enabled_before_groups_are_offloaded_which_ends_it(sample, monkeypatch, offload_as):
    cached = []

    def noted(network: torch.nn.Module, device: torch.device, **how: bool) -> None:
        cached.append(getattr(network, "is_cache_enabled", None))

    offload_as("group")
    monkeypatch.setattr(sampling, "offload_blocks", noted)
    sample(PROMPTS[0], cache=0.1)
    assert cached[0] is True
