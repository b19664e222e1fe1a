"""The rendered clips: shapes stay in frame, and move as their scene says; each flaw spoils one metric."""

import random
from dataclasses import replace

import pytest
import torch

from hyvideo.models.reward_models.moving_shapes import MOTIONS, SHAPES, Scene, measure, raw_scores
from scripts.tiny.clips import (
    BACKGROUNDS,
    FLAW_RATE,
    NUM_FRAMES,
    PALENESS,
    SIZE,
    SWAY,
    Flaws,
    render,
    sample_clip,
    sample_flaws,
    sample_mixed_clip,
)
from scripts.tiny.prompts import train_scenes


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


def scored(flaws: Flaws) -> dict[str, float]:
    """Mean raw scores of clips of many scenes that all have these flaws."""
    rng = random.Random(0)
    scenes = train_scenes()[::8]
    clips = [replace(sample_clip(scene, rng), flaws=flaws) for scene in scenes]
    return {metric: float(scores.mean()) for metric, scores in raw_scores(measure(render(clips)), scenes).items()}


@pytest.mark.parametrize(
    ("metric", "flaws", "loss"),
    [
        ("VQ", Flaws(blotches=((8, 8, 8), (50, 20, 9), (20, 52, 8), (52, 52, 10))), 0.35),
        ("MQ", Flaws(sway=SWAY), 0.5),
        ("TA", Flaws(paleness=PALENESS), 0.1),
    ],
    ids=["blotches", "sway", "paleness"],
)
def test_each_flaw_lowers_its_own_metric_and_hardly_another(metric: str, flaws: Flaws, loss: float) -> None:
    clean, flawed = scored(Flaws()), scored(flaws)
    fell = {name: clean[name] - flawed[name] for name in clean}
    assert fell.pop(metric) > loss
    assert max(fell.values()) < 0.06


def test_flaws_strike_independently_and_some_clips_do_not_show_what_their_prompt_says() -> None:
    rng, count = random.Random(0), 4000
    drawn = [sample_flaws(rng) for _ in range(count)]
    struck = torch.tensor([[bool(flaws.blotches), flaws.sway != 0, flaws.paleness != 0] for flaws in drawn]).float()
    assert struck.mean(0) == pytest.approx(torch.full((3,), FLAW_RATE), abs=0.03)
    assert torch.corrcoef(struck.T).fill_diagonal_(0).abs().max() < 0.05
    scene = Scene("cyan", "cross", "lower left", "slowly")
    clips = [sample_mixed_clip(scene, rng) for _ in range(count)]
    wrong = [clip.colour != sample_clip(scene, rng).colour for clip in clips]
    assert 0.03 < sum(wrong) / count < 0.07  # a sixth of the colours that are drawn anew are the right one
