"""Prompts of the tiny base model: which scenes it trains on, which are held out, and how a scene is worded."""

import csv
import random
from pathlib import Path

from hyvideo.models.reward_models.moving_shapes import COLOURS, MOTIONS, SHAPES, SPEEDS, Scene

WORDINGS = (
    "a {colour} {shape} moves {speed} {motion}",
    "a {colour} {shape} {speed} drifts {motion}",
    "the {colour} {shape} glides {motion} {speed}",
    "{speed} moving {motion}, a {colour} {shape}",
    "a {shape} in {colour} heads {speed} {motion}",
    "a {colour} {shape} travels {motion}, {speed}",
)
"""Sentences a scene is put into; `motion` comes with its preposition: "to the upper left", "upwards"."""

PROMPTS_PER_SCENE = {"train.csv": 2, "valid.csv": 3}
"""Rows per scene in each file, each in another wording."""


ALL_SCENES = [Scene(c, s, m, p) for c in COLOURS for s in SHAPES for m in MOTIONS for p in SPEEDS]
"""Every combination of the vocabulary, 384 scenes."""


def _is_held_out(scene: Scene) -> bool:
    """Whether no training video shows this scene: one in five, spread so that every pair of words is still seen."""
    colour, shape = list(COLOURS).index(scene.colour), list(SHAPES).index(scene.shape)
    motion, speed = list(MOTIONS).index(scene.motion), list(SPEEDS).index(scene.speed)
    return (colour + 2 * shape + motion + 3 * speed) % 5 == 0


TRAIN_SCENES = [scene for scene in ALL_SCENES if not _is_held_out(scene)]
VALID_SCENES = [scene for scene in ALL_SCENES if _is_held_out(scene)]
"""Those that the base is trained on, and those that no training video and no training prompt shows."""


def prompt(scene: Scene, wording: int) -> str:
    """Say `scene` in one of the WORDINGS, for example "a red circle moves slowly to the left"."""
    motion = f"{scene.motion}wards" if scene.motion in ("up", "down") else f"to the {scene.motion}"
    return WORDINGS[wording].format(colour=scene.colour, shape=scene.shape, motion=motion, speed=scene.speed)


def write_csv(folder: Path) -> None:
    """Write train.csv and valid.csv (column `prompt`): shuffled prompts of training scenes and of held-out ones."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, members in (("train.csv", TRAIN_SCENES), ("valid.csv", VALID_SCENES)):
        pairs = [(s, w) for s in members for w in rng.sample(range(len(WORDINGS)), PROMPTS_PER_SCENE[name])]
        rng.shuffle(pairs)
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["prompt"], *([prompt(s, w)] for s, w in pairs)])
