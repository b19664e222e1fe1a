"""Checkpoints and videos of the VideoAlign tests, written once. Read only: damage a copy."""

from pathlib import Path

import pytest
import torch

from hyvideo.data.videos import write_video
from tests.support.videoreward import VideoReward, write_videoreward


@pytest.fixture(scope="package")
def whole(tmp_path_factory: pytest.TempPathFactory) -> VideoReward:
    """The released form: one model.pth, one output."""
    return write_videoreward(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="package")
def split(tmp_path_factory: pytest.TempPathFactory) -> VideoReward:
    """The other form: adapters and the rest over the base's weights, three outputs."""
    return write_videoreward(tmp_path_factory.mktemp("split"), split=True)


@pytest.fixture(scope="package")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three videos of different sizes, lengths and frame rates."""
    folder = tmp_path_factory.mktemp("clips")
    paths = []
    for index, (frames, height, width, fps) in enumerate([(9, 64, 96, 8), (24, 48, 48, 8), (5, 80, 64, 24)]):
        noise = torch.rand(3, frames, height // 8, width // 8, generator=torch.Generator().manual_seed(index))
        video = torch.nn.functional.interpolate(noise, scale_factor=8, mode="bilinear").mul(255).byte()
        paths.append(folder / f"{index}.mp4")
        write_video(paths[-1], video.permute(1, 2, 3, 0), fps)
    return paths
