"""The moving_shapes reward: perfect videos score at the top, each fault costs the metric that should notice it."""

import dataclasses
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hyvideo.models.reward_models import moving_shapes as shapes
from scripts.tiny.clips import Clip, render, sample_clip
from scripts.tiny.prompts import ALL_SCENES, WORDINGS, prompt

METRICS = ("VQ", "MQ", "TA")
SCENES = random.Random(0).sample(ALL_SCENES, 24)
PROMPTS = [prompt(scene, index % len(WORDINGS)) for index, scene in enumerate(SCENES)]


def against(motion: str) -> str:
    """The motion whose direction is the most against this one's."""
    x, y = shapes.MOTIONS[motion]
    return min(shapes.MOTIONS, key=lambda other: x * shapes.MOTIONS[other][0] + y * shapes.MOTIONS[other][1])


def clips(wanted: list[shapes.Scene] = SCENES, **changes: object) -> list[Clip]:
    rng = random.Random(1)
    return [dataclasses.replace(sample_clip(scene, rng), **changes) for scene in wanted]


def raw(videos: Tensor) -> dict[str, Tensor]:
    return shapes.raw_scores(shapes.measure(videos), SCENES)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def next_of(vocabulary: dict, word: str) -> str:
    words = list(vocabulary)
    return words[(words.index(word) + 1) % len(words)]


def changed(name: str, change: Callable[[str], str]) -> Tensor:
    """Videos of the scenes with one word of each exchanged."""
    return render(clips([dataclasses.replace(scene, **{name: change(getattr(scene, name))}) for scene in SCENES]))


@pytest.fixture(scope="module")
def truth() -> Tensor:
    return render(clips())


@given(st.sampled_from(ALL_SCENES), st.integers(0, len(WORDINGS) - 1))
def test_every_wording_of_every_scene_is_read_back(scene, wording):
    assert shapes.parse_prompt(prompt(scene, wording)) == scene


def test_a_prompt_without_exactly_one_of_each_word_is_not_read():
    for text in ("", "a cat", "a red circle", "a red circle moves slowly"):
        assert shapes.parse_prompt(text) is None, text
    for doubled in ("red blue circle moves slowly", "red circle moves slowly quickly", "red circle moves slowly right"):
        assert shapes.parse_prompt(f"a {doubled} to the left") is None, doubled


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_the_drawn_area_and_centroid_are_those_asked_for(shape):
    mask = shapes.coverage(shape, torch.tensor([31.3, 33.8]), torch.tensor(9.0), 64, 64)
    assert mask.sum().item() == pytest.approx(shapes.SHAPES[shape] * 81, rel=0.02)
    grid = torch.arange(64) + 0.5
    assert (mask.sum(0) * grid).sum() / mask.sum() == pytest.approx(31.3, abs=0.1)
    assert (mask.sum(1) * grid).sum() / mask.sum() == pytest.approx(33.8, abs=0.1)


def test_rendered_ground_truth_scores_at_the_top_of_every_metric_in_units_of_the_bases_spread(truth):
    scores, normal = raw(truth), shapes.MovingShapesReward()(truth, PROMPTS)
    assert shapes.correct(truth, PROMPTS).all()
    for metric, mean, spread in (("VQ", 0.323, 0.090), ("MQ", 0.340, 0.134), ("TA", 0.677, 0.195)):
        assert scores[metric].min() > 0.85 and scores[metric].mean() > 0.93
        torch.testing.assert_close(normal[metric], (scores[metric] - mean) / spread)
    large = raw(render(clips(), num_frames=9, size=96))
    assert all(large[metric].mean() > 0.9 for metric in METRICS)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=seeded())


def as_pixels(videos: Tensor) -> Tensor:
    return videos.clamp(0, 255).to(torch.uint8)


def jittery(wanted: list[shapes.Scene]) -> Tensor:
    generator, frames = seeded(), []
    for index in range(17):
        shift = 3 * torch.randn(len(wanted), 2, generator=generator)
        moved = []
        for clip, offset in zip(clips(wanted), shift.tolist(), strict=True):
            centre = (clip.start[axis] + clip.velocity[axis] * index + offset[axis] for axis in (0, 1))
            moved.append(dataclasses.replace(clip, start=tuple(min(max(value, 15), 49) for value in centre)))
        frames.append(render(moved, num_frames=1))
    return torch.cat(frames, dim=1)


FAULTS = {
    "noise": ("VQ", lambda videos: as_pixels(videos + 15 * normal(*videos.shape))),
    "flicker": ("VQ", lambda videos: as_pixels(videos * (1 + 0.1 * normal(len(videos), 17, 1, 1, 1)))),
    "static": ("MQ", lambda videos: videos[:, :1].expand_as(videos)),
    "reversed": ("MQ", lambda videos: videos.flip(1)),
    "jittery": ("MQ", lambda videos: jittery(SCENES)),
    "teleporting": ("MQ", lambda videos: videos[:, torch.randperm(17, generator=seeded())]),
    "wrong colour": ("TA", lambda videos: changed("colour", partial(next_of, shapes.COLOURS))),
    "wrong shape": ("TA", lambda videos: changed("shape", partial(next_of, shapes.SHAPES))),
    "wrong direction": ("MQ", lambda videos: changed("motion", against)),
    "wrong speed": ("MQ", lambda videos: changed("speed", partial(next_of, shapes.SPEEDS))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_every_video_on_the_metric_that_should_notice_it(truth, fault):
    metric, spoil = FAULTS[fault]
    spoilt = raw(spoil(truth))
    loss = raw(truth)[metric] - spoilt[metric]
    assert loss.min() > 0.1 and loss.mean() > 0.3
    if fault in ("static", "reversed", "wrong direction", "wrong speed"):
        assert spoilt["VQ"].min() > 0.75 and spoilt["TA"].min() > 0.9


def full_frame_colour() -> Tensor:
    colours = torch.tensor([shapes.COLOURS[scene.colour] for scene in SCENES], dtype=torch.uint8)
    return colours[:, None, None, None].expand(-1, 17, 64, 64, -1).clone()


EXPLOITS = {
    "black": lambda videos: torch.zeros_like(videos),
    "frozen bright frame": lambda videos: torch.full_like(videos, 255),
    "pure noise": lambda videos: torch.randint(0, 256, videos.shape, dtype=torch.uint8, generator=seeded()),
    "full-frame colour": lambda videos: full_frame_colour(),
    "half the frame coloured": lambda videos: torch.cat([videos[..., :32, :], full_frame_colour()[..., 32:, :]], 3),
    "specks": lambda videos: render(clips(radius=2.0)),
    "giants": lambda videos: render(clips(radius=26.0)),
    "faint": lambda videos: (128 + (render(clips(background=(128,) * 3)).float() - 128) * 0.12).to(torch.uint8),
    "off screen": lambda videos: render(clips(start=(-30.0, -30.0))),
}


@pytest.mark.parametrize("exploit", EXPLOITS)
def test_a_cheap_exploit_loses_to_a_mediocre_honest_video_on_every_metric(truth, exploit):
    honest = changed("colour", partial(next_of, shapes.COLOURS))
    mediocre, cheap = raw(as_pixels(honest + 6 * normal(*honest.shape))), raw(EXPLOITS[exploit](truth))
    assert all((mediocre[metric] > cheap[metric]).all() for metric in METRICS)


def test_an_unreadable_prompt_is_nan_for_its_item_alone_and_wrong_input_refused(truth):
    reward = shapes.MovingShapesReward()
    scores = reward(truth[:3], [PROMPTS[0], "a cat", PROMPTS[2]])
    alone = reward(truth[2:3], PROMPTS[2:3])
    for metric in reward.metrics:
        assert scores[metric].dtype == torch.float32
        assert scores[metric].isnan().tolist() == [False, True, False]
        torch.testing.assert_close(scores[metric][2:], alone[metric])
    with pytest.raises(ValueError, match="argument 2 is shorter than argument 1"):
        shapes.MovingShapesReward()(truth[:2], PROMPTS[:1])
