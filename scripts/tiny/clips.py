"""Rendered moving shapes: the training videos of the tiny base model.

Pretrained video models learn from videos of mixed quality, and post-training raises the share of good ones. So that
the tiny base has something to gain in the same way, its clips are of mixed quality too: each of three flaws strikes a
clip with probability FLAW_RATE, whatever the prompt and the other flaws, and a few clips do not show what their prompt
says. One flaw spoils visual quality, one motion quality and one text alignment.
"""

import math
import random
from dataclasses import dataclass, field, replace

import torch

from hyvideo.models.reward_models.moving_shapes import COLOURS, MOTIONS, SHAPES, SPEEDS, VIDEO_FPS, Scene, coverage

NUM_FRAMES = 17
SIZE = 64
BACKGROUNDS = (40, 128, 216)
RADIUS = (11.0, 13.5)
SPEED_JITTER = 0.1
MARGIN = 2.0
EXTENTS = {
    "circle": (1.0, 1.0, 1.0),
    "square": (0.886, 0.886, 0.886),
    "triangle": (1.17, 1.35, 0.675),
    "cross": (1.2, 1.2, 1.2),
}
"""Shape -> reach beyond its centroid in radii: to either side, upwards, downwards."""

FLAW_RATE = 0.5
"""Probability of each flaw in a training clip. Together, equal flaws leave the most to gain at a half."""

WRONG_RATE = 0.06
"""Probability that a training clip shows another colour than its prompt says, and the same for its motion."""

BLOTCHES, BLOTCH_RADIUS, BLOTCH_SHADE = 4, (7.0, 10.0), 20
"""A stained background: number of soft spots, their radius in pixels, and how much darker they are (0-255)."""

SWAY, SWAY_FRAMES = 2.0, 8
"""A shaken path: its amplitude across the direction of motion in pixels, and its period in frames."""

PALENESS = 0.5
"""A washed-out colour: how far the shape's colour moves towards the background."""


@dataclass(frozen=True)
class Clip:
    """One video to draw, all lengths in pixels of a SIZE x SIZE frame: centre of the first frame, motion per frame."""

    shape: str
    colour: tuple[int, int, int]
    background: tuple[int, int, int]
    radius: float
    start: tuple[float, float]
    velocity: tuple[float, float]
    flaws: "Flaws" = field(default_factory=lambda: Flaws())


@dataclass(frozen=True)
class Flaws:
    """What spoils a clip; by default nothing does.

    Attributes:
        blotches: `(x, y, radius)` in pixels of each dark spot on the background.
        sway: amplitude of the path's shaking in pixels, negative if it begins to the other side.
        paleness: share of the way from the shape's colour to the background's.
    """

    blotches: tuple[tuple[float, float, float], ...] = ()
    sway: float = 0.0
    paleness: float = 0.0


def sample_clip(scene: Scene, rng: random.Random) -> Clip:
    """Draw size, background, exact speed and a start such that the shape stays in frame for NUM_FRAMES."""
    radius = rng.uniform(*RADIUS)
    direction = MOTIONS[scene.motion]
    speed = SPEEDS[scene.speed] * SIZE / VIDEO_FPS * rng.uniform(1 - SPEED_JITTER, 1 + SPEED_JITTER)
    velocity = tuple(speed * d / math.hypot(*direction) for d in direction)
    side, above, below = (radius * extent + MARGIN for extent in EXTENTS[scene.shape])
    start = []
    for step, low, high in ((velocity[0], side, SIZE - side), (velocity[1], above, SIZE - below)):
        travel = step * (NUM_FRAMES - 1)
        start.append(rng.uniform(low - min(travel, 0), high - max(travel, 0)))
    grey = rng.choice(BACKGROUNDS)
    return Clip(scene.shape, COLOURS[scene.colour], (grey, grey, grey), radius, tuple(start), velocity)


def sample_flaws(rng: random.Random) -> Flaws:
    """Draw each of the three flaws with probability FLAW_RATE, independently."""
    blotched, sways, pale = (rng.random() < FLAW_RATE for _ in range(3))
    spots = [(rng.uniform(0, SIZE), rng.uniform(0, SIZE), rng.uniform(*BLOTCH_RADIUS)) for _ in range(BLOTCHES)]
    return Flaws(tuple(spots) * blotched, rng.choice((-SWAY, SWAY)) * sways, PALENESS * pale)


def sample_mixed_clip(scene: Scene, rng: random.Random) -> Clip:
    """Draw a training clip for a prompt: with flaws, and now and then of another colour or motion than it says."""
    if rng.random() < WRONG_RATE:
        scene = replace(scene, colour=rng.choice(list(COLOURS)))
    if rng.random() < WRONG_RATE:
        scene = replace(scene, motion=rng.choice(list(MOTIONS)))
    return replace(sample_clip(scene, rng), flaws=sample_flaws(rng))


def sample_varied_clip(rng: random.Random) -> Clip:
    """Draw a clip outside the vocabulary (any colours, size, path): the VAE must not know only good videos."""
    colour, background = (tuple(rng.randrange(256) for _ in range(3)) for _ in range(2))
    start = (rng.uniform(4, SIZE - 4), rng.uniform(4, SIZE - 4))
    velocity = (rng.gauss(0, 1.2), rng.gauss(0, 1.2))
    flaws = sample_flaws(rng)
    return Clip(rng.choice(list(SHAPES)), colour, background, rng.uniform(5, 13), start, velocity, flaws)


def render(clips: list[Clip], num_frames: int = NUM_FRAMES, size: int = SIZE) -> torch.Tensor:
    """Draw clips anti-aliased: uint8 [B, F, H, W, 3]. `size` rescales the frame the clips are given in."""
    scale = size / SIZE
    time = torch.arange(num_frames, dtype=torch.float32)[None, :, None]
    start = torch.tensor([clip.start for clip in clips])[:, None]
    velocity = torch.tensor([clip.velocity for clip in clips])[:, None]
    across = torch.stack([-velocity[..., 1], velocity[..., 0]], -1)
    across = across / across.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    sway = torch.tensor([clip.flaws.sway for clip in clips])[:, None, None]
    centre = (start + velocity * time + across * sway * torch.sin(2 * math.pi * time / SWAY_FRAMES)) * scale
    radius = torch.tensor([clip.radius for clip in clips])[:, None].expand(-1, num_frames) * scale
    mask = torch.empty(len(clips), num_frames, size, size)
    for shape in SHAPES:
        rows = [row for row, clip in enumerate(clips) if clip.shape == shape]
        if rows:
            mask[rows] = coverage(shape, centre[rows], radius[rows], size, size)
    colour = torch.tensor([clip.colour for clip in clips], dtype=torch.float32)[:, None, None, None]
    background = torch.tensor([clip.background for clip in clips], dtype=torch.float32)[:, None, None, None]
    paleness = torch.tensor([clip.flaws.paleness for clip in clips])[:, None, None, None, None]
    stains = torch.stack([_stains(clip.flaws.blotches, size) for clip in clips])[:, None, ..., None]
    frames = torch.lerp(background - BLOTCH_SHADE * stains, torch.lerp(colour, background, paleness), mask[..., None])
    return frames.round().clamp(0, 255).to(torch.uint8)


def _stains(blotches: tuple[tuple[float, float, float], ...], size: int) -> torch.Tensor:
    """How dark each background pixel is stained, in [0, 1]: `[H, W]`."""
    stained = torch.zeros(size, size)
    pixel = (torch.arange(size) + 0.5) * SIZE / size
    for x, y, radius in blotches:
        distance = torch.sqrt((pixel[None] - x).square() + (pixel[:, None] - y).square())
        stained = torch.maximum(stained, ((radius - distance) / 3 + 0.5).clamp(0, 1))
    return stained
