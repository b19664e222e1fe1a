"""The scenes of the tiny base: held-out ones really are, each pair of words is known, and shapes stay in frame."""

import csv
import random
from itertools import combinations
from pathlib import Path

import pytest
import torch

from hyvideo.models.reward_models.moving_shapes import MOTIONS, SHAPES, Scene, parse_prompt
from scripts.tiny.clips import render, sample_clip
from scripts.tiny.prompts import ALL_SCENES, TRAIN_SCENES, VALID_SCENES, write_csv

BUNDLED = Path(__file__).parents[3] / "assets" / "tiny" / "prompts"


def rows(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        return [row["prompt"] for row in csv.DictReader(file)]


def pairs_of_words(scene: Scene) -> set[tuple[str, str]]:
    return set(combinations((scene.colour, scene.shape, scene.motion, scene.speed), 2))


def test_scenes_are_held_out_whose_every_pair_of_words_is_seen_in_training() -> None:
    assert len(ALL_SCENES) == 384 and len(VALID_SCENES) == 77
    assert not set(TRAIN_SCENES) & set(VALID_SCENES)
    seen = set().union(*map(pairs_of_words, TRAIN_SCENES))
    assert all(pairs_of_words(scene) <= seen for scene in VALID_SCENES)


def test_the_bundled_files_hold_unique_readable_prompts_of_their_own_scenes_as_the_program_writes_them(tmp_path):
    train, valid = rows(BUNDLED / "train.csv"), rows(BUNDLED / "valid.csv")
    assert len(train) >= 400 and len(valid) >= 200
    assert len(set(train)) == len(train) and len(set(valid)) == len(valid)
    assert {parse_prompt(text) for text in train} == set(TRAIN_SCENES)
    assert {parse_prompt(text) for text in valid} == set(VALID_SCENES)
    write_csv(tmp_path)
    for name in ("train.csv", "valid.csv"):
        assert (tmp_path / name).read_bytes() == (BUNDLED / name).read_bytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("motion", MOTIONS)
def test_a_shape_never_touches_the_border(shape: str, motion: str) -> None:
    rng = random.Random(0)
    clips = [sample_clip(Scene("red", shape, motion, "quickly"), rng) for _ in range(16)]
    videos = render(clips)
    border = torch.cat([videos[:, :, 0], videos[:, :, -1], videos[:, :, :, 0], videos[:, :, :, -1]], dim=2)
    background = torch.tensor([clip.background for clip in clips], dtype=torch.uint8)[:, None, None]
    assert torch.equal(border, background.expand_as(border))
