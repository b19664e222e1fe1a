"""What the drift log sees of changes that the reward hardly sees."""

import random

import pytest
import torch

from hyvideo.models.reward_models.moving_shapes import Scene
from scripts.tiny.clips import render, sample_clip
from scripts.tiny.drift import appearance

SCENES = [Scene(colour, "square", "left", "slowly") for colour in ("red", "green", "blue")]
PROMPTS = [f"a {scene.colour} square moves slowly to the left" for scene in SCENES]
CLEAN = render([sample_clip(scene, random.Random(1)) for scene in SCENES])


def dotted(videos: torch.Tensor) -> torch.Tensor:
    """Faint regular dots."""
    videos = videos.clone()
    videos[:, :, ::4, ::4] -= 8
    return videos


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        (lambda videos: videos - 12, {"background"}),
        (lambda videos: videos + torch.tensor([9, 0, 0]), {"red", "green", "blue", "background"}),
        (dotted, {"roughness"}),
        (lambda videos: videos.flip(0), {"hits"}),
    ],
)
def test_each_change_moves_its_own_measure(change, moved):
    before = appearance(CLEAN, PROMPTS)
    assert before["hits"].all() and before["background"].amax() < 2
    after = appearance(change(CLEAN.short()).clamp(0, 255).to(torch.uint8), PROMPTS)
    difference = {name: float((after[name] - before[name]).abs().mean()) for name in before}
    tolerance = {"hits": 0.5, "background": 1.5, "roughness": 0.3}
    colours = {"red", "green", "blue"} if moved == {"hits"} else set()
    assert {name for name, size in difference.items() if size > tolerance.get(name, 0.4)} - colours == moved
