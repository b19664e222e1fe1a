"""generate.py --offload group on a CPU, where blocks are called by the same hooks but do not move: the same pixels."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable

import pytest
import torch

from generate import parse_arguments
from hyvideo.data.videos import read_video
from hyvideo.evaluation import generate as sampling
from tests.support.original_layout import save_super_resolution
from tests.support.training import flags_of, noisy_image


@pytest.fixture
def offload_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool | str], None]:
    """Offload as is said after the check that there is a GPU, which is all that is left out."""
    check = sampling.request_of

    def choose(offload: bool | str) -> None:
        def without_a_gpu(arguments: Namespace) -> sampling.Request:
            request = check(arguments)
            request.arguments.offload = offload
            return request

        monkeypatch.setattr(sampling, "request_of", without_a_gpu)

    return choose


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_videos_sharpened_videos_and_their_notes_are_the_same(original_root, tmp_path, monkeypatch, offload_as, task):
    root = shutil.copytree(original_root, tmp_path / "ckpts")
    save_super_resolution(root)
    noisy_image(0, (64, 64)).save(tmp_path / "image.png")
    flags = {"model_path": root, "transformer_version": f"480p_{task}", "prompt": 'a cat with the sign "cat"'}
    flags |= {"fixed_size": "640x640", "video_length": 5, "num_inference_steps": 2, "guidance_scale": 3.0}
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


def test_a_cache_is_enabled_before_groups_are_offloaded_which_ends_it(tiny_root, tmp_path, monkeypatch, offload_as):
    cached = []

    def noted(network: torch.nn.Module, device: torch.device, **how: bool) -> None:
        cached.append(getattr(network, "is_cache_enabled", None))

    offload_as("group")
    monkeypatch.setattr(sampling, "offload_blocks", noted)
    flags = {"model_path": tiny_root, "prompt": "a cat", "output_path": tmp_path / "a.mp4", "cache": 0.1}
    flags |= {"num_inference_steps": 4, "fixed_size": "32x48", "video_length": 9, "guidance_scale": 3.0, "shift": 3.0}
    sampling.generate(parse_arguments(flags_of(flags)))
    assert cached[0] is True
