"""Drift: which look of videos changed, how alike they became, and that chance is not taken for a change."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hyvideo.evaluation.drift import DRIFT, LOOKS, drift, drift_of, looks_of, write_drift
from hyvideo.models.reward_models.moving_shapes import Scene
from hyvideo.observability.scored_videos import ScoredVideo
from scripts.tiny.clips import BACKGROUNDS, render, sample_clip
from scripts.tiny.prompts import ALL_SCENES

SCENES = random.Random(0).sample(ALL_SCENES, 24)
CLIPS = [sample_clip(scene, random.Random(number)) for number, scene in enumerate(SCENES)]
PROMPTS = [str(number) for number in range(len(SCENES))]


def on(*greys: int) -> Tensor:
    return render([replace(clip, background=(greys[i % len(greys)],) * 3) for i, clip in enumerate(CLIPS)])


CLEAN = on(*BACKGROUNDS)


def changed(change) -> Tensor:
    return change(CLEAN.float()).clamp(0, 255).to(torch.uint8)


def sharpened(videos: Tensor) -> Tensor:
    videos[:, :, ::2, ::2] += 12
    videos[:, :, 1::2, 1::2] -= 12
    return videos


def flickering(videos: Tensor) -> Tensor:
    videos[:, ::2] *= 0.9
    return videos


def faded(videos: Tensor, to: float = 0.5) -> Tensor:
    background = videos[:, :, :4, :4].mean((2, 3), keepdim=True)
    return background + to * (videos - background)


def saturated(videos: Tensor) -> Tensor:
    return videos.mean(-1, keepdim=True) + 1.5 * (videos - videos.mean(-1, keepdim=True))


def many_hues(videos: Tensor) -> Tensor:
    videos[:, :, :20, :, 0] += 60
    videos[:, :, -20:, :, 2] += 60
    return videos


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda videos: videos + 30, "brightness"),
        (saturated, "saturation"),
        (many_hues, "hue_spread"),
        (sharpened, "sharpness"),
        (lambda videos: videos[:, :1].expand(videos.shape), "motion"),
        (flickering, "flicker"),
        (lambda videos: on(BACKGROUNDS[1]).float(), "border"),
    ],
)
def test_the_look_that_was_changed_is_named_first(change, first):
    found = drift(looks_of(CLEAN), looks_of(changed(change)), PROMPTS)
    assert next(iter(found.changes)) == first and str(found).startswith(first)


def test_contrast_of_grey_videos_is_named():
    grey = CLEAN.float().mean(-1, keepdim=True).expand(CLEAN.shape)
    before, after = (looks_of(faded(grey, to).to(torch.uint8)) for to in (1.0, 0.5))
    assert str(drift(before, after, PROMPTS)).startswith("contrast")


@pytest.mark.parametrize(
    ("change", "to"),
    [(faded, 1), (flickering, 1), (lambda videos: videos[:, : videos.shape[1] // 2].repeat_interleave(2, 1), 0.5)],
    ids=["fainter contours", "the whole frame's light", "half as fast"],
)
def test_motion_is_how_far_contours_move_whatever_their_contrast(change, to):
    before, after = (sum(video["motion"] for video in looks_of(v)) for v in (CLEAN, changed(change)))
    assert after / before == pytest.approx(to, rel=0.12)


def test_motion_has_a_direction_that_its_amount_does_not_change():
    ways = [Scene("red", "square", way, "quickly") for way in ("right", "up")]
    right, up = (render([sample_clip(scene, random.Random(1))]) for scene in ways)
    looks = [looks_of(videos)[0] for videos in (right, up)]
    assert looks[0]["direction_x"] > 0.8 and abs(looks[0]["direction_y"]) < 0.1
    assert looks[1]["direction_y"] < -0.8 and abs(looks[1]["direction_x"]) < 0.1
    (slow,) = looks_of(right[:, : right.shape[1] // 2].repeat_interleave(2, 1))
    assert slow["direction_x"] == pytest.approx(looks[0]["direction_x"], rel=0.15)
    for short in looks_of(right[:, :1, :1, :1]) + looks_of(right[:, :3, :1]):
        assert set(short) == set(LOOKS) and np.isfinite(list(short.values())).all()


def test_videos_that_become_alike_over_prompts_or_within_one_show_though_their_mean_stays():
    rng = np.random.default_rng(0)
    of_prompt, own = rng.normal(size=(24, 1)), rng.normal(size=(24, 2))
    prompts = [str(number) for number in range(24) for _ in range(2)]

    def looks(spread: float, siblings: float) -> list[dict[str, float]]:
        return [dict.fromkeys(LOOKS, value) for value in (spread * of_prompt + siblings * own).ravel().tolist()]

    assert str(drift(looks(1, 0.5), looks(1, 0.5), prompts)) == "no look clearly changed"
    change = drift(looks(1, 0.5), looks(0.2, 0.5), prompts).changes["border"]
    assert change.spread.high < -0.3 and change.siblings.mean == pytest.approx(0, abs=1e-6)
    change = drift(looks(1, 0.5), looks(1, 0.1), prompts).changes["border"]
    assert change.siblings.mean == pytest.approx(-0.8, abs=1e-3) and change.siblings.high < -0.7
    assert change.in_words("border") == "border among siblings -80 %"
    assert drift(looks(1, 0), looks(1, 0), prompts[::2] * 2).siblings
    assert not drift(looks(1, 0), looks(1, 0), list(map(str, range(48)))).siblings


def test_a_look_whose_mean_and_spread_fall_together_counts_once():
    values = np.random.default_rng(0).exponential(size=200)
    before = [dict.fromkeys(LOOKS, value) for value in values]
    after = [
        {**old, "flicker": 0.3 * value, "border": 1 + 0.1 * (value - 1)}
        for old, value in zip(before, values, strict=True)
    ]
    assert list(drift(before, after, list(map(str, range(200)))).changes)[:2] == ["border", "flicker"]


def test_a_spread_that_ended_is_all_gone_and_one_that_began_has_no_bound(tmp_path):
    rng = np.random.default_rng(0)
    small, none = ([dict.fromkeys(LOOKS, value) for value in values] for values in (1e-4 * rng.random(24), [0.0] * 24))
    assert drift(small, none, PROMPTS).changes["flicker"].spread.mean < -0.7
    few = [dict.fromkeys(LOOKS, float(number == 0)) for number in range(24)]
    begun = drift(none, few, PROMPTS)
    assert begun.changes["border"].spread.high == np.inf
    write_drift(tmp_path, 3, begun)
    facts = json.loads((tmp_path / DRIFT).read_text(), parse_constant=pytest.fail)
    assert facts["changes"]["border"]["spread"]["high"] is None and facts["named"] == str(begun)


def test_intervals_over_all_looks_together_miss_in_few_of_many_comparisons():
    rng, missed = np.random.default_rng(0), 0
    for _ in range(300):
        common = rng.choice([-1.0, 0.0, 1.0], size=(32, len(LOOKS)))
        sides = [common + 0.5 * rng.normal(size=common.shape) for _ in range(2)]
        looks = [[dict(zip(LOOKS, video, strict=True)) for video in side] for side in sides]
        found = drift(*looks, [str(number) for number in range(32)])
        missed += any(part.low > 0 or part.high < 0 for c in found.changes.values() for part in c.parts().values())
    assert missed <= 0.08 * 300  # 0.05 in the long run


def test_only_pairs_whose_looks_are_known_are_compared(tmp_path):
    videos = [ScoredVideo(tmp_path / f"{i}.mp4", str(i), looks=looks) for i, looks in enumerate(looks_of(CLEAN[:4]))]
    assert drift_of(list(zip(videos, videos, strict=True))).num_pairs == 4
    assert drift_of(()) is None and drift_of([(videos[0], videos[0])] * 9) is None
    assert drift_of([*zip(videos, videos, strict=True), (videos[3], replace(videos[3], looks={}))]) is None
