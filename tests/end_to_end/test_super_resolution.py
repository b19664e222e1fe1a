"""generate.py --sr true: a video and its sharp version, made once; and what is said where it cannot be made."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from hyvideo.data.videos import read_video
from tests.support.original_layout import save_super_resolution
from tests.support.training import flags_of, noisy_image, write_prompts


@pytest.fixture(scope="module")
def root(original_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with what sharpens videos of 480p."""
    root = tmp_path_factory.mktemp("sharp") / "ckpts"
    shutil.copytree(original_root, root)
    return save_super_resolution(root)


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_a_video_is_sharpened_from_640_to_960_pixels_and_the_one_before_is_the_plain_one(command_line, root, task):
    noisy_image(0, (64, 64)).save(command_line.folder / "image.png")
    asked = {"model_path": root, "transformer_version": f"480p_{task}", "prompt": "a cat", "fixed_size": "640x640"}
    asked |= {"video_length": 1, "num_inference_steps": 1, "guidance_scale": 1.0}
    asked |= {"image_path": command_line.folder / "image.png"} if task == "i2v" else {}
    sharp = flags_of(asked | {"sr": "true", "save_pre_sr_video": "true", "output_path": "a.mp4"})
    finished = command_line.run("generate.py", sharp)
    assert finished.returncode == 0, finished.stderr
    video = read_video(command_line.folder / "a.mp4")
    note = json.loads((command_line.folder / "a.json").read_text())
    assert video.shape == (1, 960, 960, 3) and note["sr_size"] == "960x960" and note["sr_num_inference_steps"] == 6
    assert "a.mp4 is finished already" in command_line.run("generate.py", sharp).stderr
    few = {"sr": "true", "sr_num_inference_steps": 2, "output_path": "c.mp4"}
    if task == "t2v":  # VBench takes every file of a folder for a video
        few |= {"prompts_csv": write_prompts(command_line.folder / "cat.csv", ["a cat"]), "prompt": None}
        few |= {"file_names": "vbench", "save_pre_sr_video": "true", "output_path": "c"}
    for flags in ({"output_path": "b.mp4"}, few):
        finished = command_line.run("generate.py", flags_of(asked | flags))
        assert finished.returncode == 0, finished.stderr
    before = read_video(command_line.folder / "a_before_sr.mp4")
    assert torch.equal(before, read_video(command_line.folder / "b.mp4")) and before.shape == (1, 640, 640, 3)
    of_few = {path.name for path in command_line.folder.glob("c*/*.mp4")}
    assert of_few == ({"a cat-0.mp4", "a cat-0_before_sr.mp4"} if task == "t2v" else set())
    (sharp_video,) = command_line.folder.glob("c/*.mp4" if task == "t2v" else "c*.mp4")
    assert not torch.equal(video, read_video(sharp_video))
    assert "sr" not in json.loads((command_line.folder / "b.json").read_text())


def test_what_is_missing_or_cannot_be_sharpened_is_named_before_loading(command_line, root, original_root, tiny_root):
    def told(model: Path, **flags: str) -> str:
        flags = {"model_path": model, "prompt": "a cat", "output_path": "a.mp4", **flags}
        finished = command_line.run("generate.py", flags_of(flags))
        assert finished.returncode == 2
        return finished.stderr

    t2v = {"transformer_version": "480p_t2v", "sr": "true"}
    missing = told(original_root, **t2v)
    for folder in ("transformer", "upsampler"):
        assert f"{original_root / folder}/720p_sr_distilled" in missing
        assert f"--include '{folder}/720p_sr_distilled/*'" in missing
    assert "nearest is --fixed_size 640x640" in told(root, **t2v, fixed_size="64x64")
    assert "in that of diffusers" in told(tiny_root, sr="true")
    assert "goes with --sr true" in told(root, transformer_version="480p_t2v", sr_num_inference_steps="2")
    assert "must be a number in [1, inf)" in told(root, **t2v, sr_num_inference_steps="0")
    assert "only sharpens the videos of another version" in told(root, transformer_version="720p_sr_distilled")
