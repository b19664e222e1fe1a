"""What the drift log sees of changes that the reward hardly sees."""

import random
from dataclasses import replace

import pytest
import torch

from hyvideo.models.reward_models.moving_shapes import Scene
from scripts.tiny.clips import BACKGROUNDS, render, sample_clip
from scripts.tiny.drift import appearance, drift

SCENES = [Scene(colour, "square", "left", "slowly") for colour in ("red", "green", "blue")] * 4
PROMPTS = [f"a {scene.colour} square moves slowly to the left" for scene in SCENES]
CLIPS = [sample_clip(scene, random.Random(1)) for scene in SCENES]


def on(*greys: int) -> torch.Tensor:
    return render([replace(clip, background=(greys[i % len(greys)],) * 3) for i, clip in enumerate(CLIPS)])


CLEAN = on(*BACKGROUNDS, *BACKGROUNDS[::-1])


def dotted(videos: torch.Tensor) -> torch.Tensor:
    videos = videos.clone()
    videos[:, :, ::4, ::4] -= 8
    return videos


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        (lambda videos: videos - 12, {"background"}),
        (lambda videos: videos + torch.tensor([9, 0, 0]), {"red", "green", "blue", "background"}),
        (dotted, {"roughness"}),
        (lambda videos: videos.roll(1, 0), {"hits", "background"}),
    ],
)
def test_each_change_moves_its_own_measure(change, moved):
    before = appearance(CLEAN, PROMPTS)
    assert before["hits"].all()
    found = drift(before, appearance(change(CLEAN.short()).clamp(0, 255).to(torch.uint8), PROMPTS))
    tolerance = {"hits": 0.5, "background": 1.5, "roughness": 0.3}
    colours = {"red", "green", "blue"} if "hits" in moved else set()
    differ = {name for name, change in found.changes.items() if change.moved > tolerance.get(name, 0.4)}
    assert differ - colours == moved


def test_backgrounds_that_collapse_to_one_level_show_though_their_mean_stays_and_the_same_videos_do_not_drift():
    before, after = (appearance(videos, PROMPTS) for videos in (CLEAN, on(BACKGROUNDS[1])))
    found = drift(before, after)
    third = pytest.approx(1 / 3)
    assert found.backgrounds == {"dark": (third, 0), "grey": (third, 1), "light": (third, 0)}
    change = found.changes["background"]
    assert found.collapsed
    assert abs(change.gain.mean) < 1  # as many rise as fall: the mean alone says that nothing happened
    assert change.moved == pytest.approx(2 / 3 * 88, abs=1) and change.spread[0] > 70 and change.spread[1] < 1
    assert "dark backgrounds 33% before, 0% after; grey 33%, 100%; light 33%, 0%" in str(found)
    looks = appearance(CLEAN, PROMPTS)
    found = drift(looks, looks)
    assert not found.collapsed
    assert all(change.moved == 0 and change.spread[0] == change.spread[1] for change in found.changes.values())
    assert all(before == after for before, after in found.backgrounds.values())
