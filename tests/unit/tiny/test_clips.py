"""The rendered clips: shapes stay in frame, and move as their scene says; each flaw spoils one metric."""

import random

import pytest
import torch

from hyvideo.models.reward_models.moving_shapes import MOTIONS, SHAPES, Scene
from scripts.tiny.clips import render, sample_clip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("motion", MOTIONS)
def test_a_shape_never_touches_the_border(shape: str, motion: str) -> None:
    rng = random.Random(0)
    clips = [sample_clip(Scene("red", shape, motion, "quickly"), rng) for _ in range(16)]
    videos = render(clips)
    border = torch.cat([videos[:, :, 0], videos[:, :, -1], videos[:, :, :, 0], videos[:, :, :, -1]], dim=2)
    background = torch.tensor([clip.background for clip in clips], dtype=torch.uint8)[:, None, None]
    assert torch.equal(border, background.expand_as(border))
