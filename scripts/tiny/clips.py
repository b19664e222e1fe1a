"""Rendered moving shapes: the training videos of the tiny base model and their exact ground truth."""

import math
import random
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Clip:
    """One video to draw, all lengths in pixels of a SIZE x SIZE frame: centre of the first frame, motion per frame."""

    shape: str
    colour: tuple[int, int, int]
    background: tuple[int, int, int]
    radius: float
    start: tuple[float, float]
    velocity: tuple[float, float]


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


def sample_varied_clip(rng: random.Random) -> Clip:
    """Draw a clip outside the vocabulary (any colours, size, path): the VAE must not know only good videos."""
    colour, background = (tuple(rng.randrange(256) for _ in range(3)) for _ in range(2))
    start = (rng.uniform(4, SIZE - 4), rng.uniform(4, SIZE - 4))
    velocity = (rng.gauss(0, 1.2), rng.gauss(0, 1.2))
    return Clip(rng.choice(list(SHAPES)), colour, background, rng.uniform(5, 13), start, velocity)


def render(clips: list[Clip], num_frames: int = NUM_FRAMES, size: int = SIZE) -> torch.Tensor:
    """Draw clips anti-aliased: uint8 [B, F, H, W, 3]. `size` rescales the frame the clips are given in."""
    scale = size / SIZE
    time = torch.arange(num_frames, dtype=torch.float32)[None, :, None]
    start = torch.tensor([clip.start for clip in clips])[:, None]
    velocity = torch.tensor([clip.velocity for clip in clips])[:, None]
    centre = (start + velocity * time) * scale
    radius = torch.tensor([clip.radius for clip in clips])[:, None].expand(-1, num_frames) * scale
    mask = torch.empty(len(clips), num_frames, size, size)
    for shape in SHAPES:
        rows = [row for row, clip in enumerate(clips) if clip.shape == shape]
        if rows:
            mask[rows] = coverage(shape, centre[rows], radius[rows], size, size)
    colour = torch.tensor([clip.colour for clip in clips], dtype=torch.float32)[:, None, None, None]
    background = torch.tensor([clip.background for clip in clips], dtype=torch.float32)[:, None, None, None]
    return torch.lerp(background, colour, mask[..., None]).round().to(torch.uint8)
