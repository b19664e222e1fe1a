"""The rendered clips: shapes stay in frame, and move as their scene says; each flaw spoils one metric."""

import random

import pytest
import torch

from hyvideo.models.reward_models.moving_shapes import MOTIONS, SHAPES, Scene
from scripts.tiny.clips import BACKGROUNDS, NUM_FRAMES, SIZE, render, sample_clip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("motion", MOTIONS)
def test_a_shape_never_touches_the_border(shape: str, motion: str) -> None:
    rng = random.Random(0)
    clips = [sample_clip(Scene("red", shape, motion, "quickly"), rng) for _ in range(16)]
    videos = render(clips)
    border = torch.cat([videos[:, :, 0], videos[:, :, -1], videos[:, :, :, 0], videos[:, :, :, -1]], dim=2)
    background = torch.tensor([clip.background for clip in clips], dtype=torch.uint8)[:, None, None]
    assert torch.equal(border, background.expand_as(border))


def test_a_clip_is_seventeen_frames_of_one_colour_on_a_plain_grey() -> None:
    rng = random.Random(0)
    clip = sample_clip(Scene("yellow", "square", "left", "slowly"), rng)
    (video,) = render([clip])
    assert video.shape == (NUM_FRAMES, SIZE, SIZE, 3) and video.dtype == torch.uint8
    assert clip.background[0] in BACKGROUNDS and len(set(clip.background)) == 1
    column, row = (round(value) for value in clip.start)
    assert tuple(video[0, row, column].tolist()) == clip.colour
