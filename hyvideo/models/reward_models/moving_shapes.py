"""The vocabulary of the tiny base model's videos (moving shapes) and the reward that measures them from pixels.

A video is explained as one flat shape of constant colour and size that stands on one flat background and may move
freely. What the explanation leaves over is quality (VQ), how its centre moves is motion (MQ), and which colour and
shape it names is alignment (TA). A video that shows no such thing scores 0 on all three before normalisation, so that
blank or flat frames, specks and full-frame colours never pay.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.models.reward_models.registry import RewardModel, register_reward

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 40),
    "purple": (180, 40, 200),
    "cyan": (40, 205, 215),
}
"""Colour word -> sRGB value of the flat shape."""

SHAPES: dict[str, float] = {"circle": 3.1416, "square": 3.1400, "triangle": 2.3674, "cross": 3.3264}
"""Shape word -> area in squared radii; `coverage` draws them."""

MOTIONS: dict[str, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "upper left": (-1, -1),
    "upper right": (1, -1),
    "lower left": (-1, 1),
    "lower right": (1, 1),
}
"""Direction -> sign of (x, y) motion in the frame, y pointing down."""

SPEEDS: dict[str, float] = {"slowly": 0.22, "quickly": 0.5}
"""Speed word -> frame widths travelled per second along the direction of motion."""

DIRECTION_WORDS: dict[str, str] = {
    **{word: word for word in ("left", "right", "upper", "lower", "up", "down")},
    **{"upwards": "up", "downwards": "down"},
}
"""Word in a prompt -> word in a key of MOTIONS."""

SPEED_WORDS: dict[str, set[str]] = {"slowly": {"slow", "slowly"}, "quickly": {"quick", "quickly", "fast"}}
"""Key of SPEEDS -> the words that ask for it."""

VIDEO_FPS = 24
"""Frames per second at which SPEEDS hold."""

AREA_RANGE = (0.06, 0.165)
"""Share of the frame that a plausible shape covers; the training videos span 0.07 to 0.148."""

CALIBRATION: dict[str, tuple[float, float]] = {"VQ": (0.323, 0.090), "MQ": (0.340, 0.134), "TA": (0.677, 0.195)}
"""Metric -> mean and standard deviation of its raw score over ODE samples of the tiny base for held-out prompts."""


@dataclass(frozen=True)
class Scene:
    """What a prompt asks for: a key each of COLOURS, SHAPES, MOTIONS and SPEEDS."""

    colour: str
    shape: str
    motion: str
    speed: str


def parse_prompt(prompt: str) -> Scene | None:
    """Read the scene that a prompt asks for; None unless it names exactly one colour, shape, motion and speed."""
    words = set(re.findall(r"[a-z]+", prompt.lower()))
    ways = {DIRECTION_WORDS[word] for word in words if word in DIRECTION_WORDS}
    matches = (
        [colour for colour in COLOURS if colour in words],
        [shape for shape in SHAPES if shape in words],
        [motion for motion in MOTIONS if set(motion.split()) == ways],
        [speed for speed, forms in SPEED_WORDS.items() if forms & words],
    )
    if any(len(match) != 1 for match in matches):
        return None
    return Scene(*(match[0] for match in matches))


def signed_distance(shape: str, dx: Tensor, dy: Tensor, radius: Tensor) -> Tensor:
    """Distance in pixels to the outline of a SHAPE (negative inside) at offsets (dx, dy) from its centroid, y down."""
    if shape == "circle":
        return torch.sqrt(dx.square() + dy.square()) - radius
    if shape == "square":
        return torch.maximum(dx.abs(), dy.abs()) - 0.886 * radius
    if shape == "triangle":
        return torch.maximum(dy, 0.8660 * dx.abs() - 0.5 * dy) - 0.675 * radius
    length, breadth = 1.2 * radius, 0.42 * radius  # of the bars of a cross
    bar = torch.maximum(dx.abs() - length, dy.abs() - breadth)
    return torch.minimum(bar, torch.maximum(dx.abs() - breadth, dy.abs() - length))


def coverage(shape: str, centre: Tensor, radius: Tensor, height: int, width: int) -> Tensor:
    """Anti-aliased coverage in [0, 1], `[..., H, W]`, of a shape at `centre` `[..., 2]` (x, y), lengths in pixels."""
    x = torch.arange(width, dtype=torch.float32) + 0.5 - centre[..., 0, None]
    y = torch.arange(height, dtype=torch.float32) + 0.5 - centre[..., 1, None]
    distance = signed_distance(shape, x[..., None, :], y[..., :, None], radius[..., None, None])
    return (0.5 - distance).clamp(0, 1)


@dataclass(frozen=True)
class Measurement:
    """How B videos look when each is explained as one flat shape on one flat background (S shapes, F frames).

    Attributes:
        colour: `[B, 3]` colour of the shape (0-255).
        centre: `[B, F, 2]` centroid (x, y) of the shape as a share of the frame's width and height.
        overlap: `[B, S]` mean soft intersection over union with each of SHAPES, in [0, 1].
        presence: `[B]` how far every frame shows something of plausible size and contrast, in [0, 1].
        unexplained: `[B]` squared error of the explanation relative to the shape's own energy; 0 is perfect.
    """

    colour: Tensor
    centre: Tensor
    overlap: Tensor
    presence: Tensor
    unexplained: Tensor


def measure(videos: Tensor) -> Measurement:
    """Measure uint8 videos `[B, F, H, W, 3]` from pixels alone."""
    pixels = videos.detach().cpu().float()
    background = pixels[:, :, ::2, ::2].flatten(1, 3).median(1).values
    offset = pixels - background[:, None, None, None]
    colour = _shape_offset(offset)
    energy = colour.square().sum(-1).clamp_min(1.0)
    share = torch.einsum("bfhwc,bc->bfhw", offset, colour / energy[:, None]).clamp(0, 1)
    solid = ((share - 0.2) / 0.6).clamp(0, 1)
    area = solid.sum((2, 3))  # [B, F], in pixels
    x = (solid.sum(2) * (torch.arange(solid.shape[3]) + 0.5)).sum(2) / area.clamp_min(1e-3)
    y = (solid.sum(3) * (torch.arange(solid.shape[2]) + 0.5)).sum(2) / area.clamp_min(1e-3)
    centre = torch.stack([x, y], dim=-1)
    radii = [(area.mean(1) / of_unit).sqrt()[:, None].expand(area.shape) for of_unit in SHAPES.values()]
    drawn = [coverage(shape, centre, radius, *solid.shape[2:]) for shape, radius in zip(SHAPES, radii, strict=True)]
    templates = torch.stack(drawn, dim=1)  # every shape with that area, [B, S, F, H, W]
    common, either = torch.minimum(solid[:, None], templates), torch.maximum(solid[:, None], templates)
    overlap = (common.sum((3, 4)) / either.sum((3, 4)).clamp_min(1e-3)).mean(2)
    best = templates[torch.arange(len(templates)), overlap.argmax(1)]
    error = (offset - best[..., None] * colour[:, None, None, None]).square().sum((1, 2, 3, 4))
    return Measurement(
        colour=background + colour,
        centre=centre / torch.tensor([share.shape[3], share.shape[2]]),
        overlap=overlap,
        presence=_presence(area / math.prod(share.shape[2:]), energy.sqrt()),
        unexplained=error / (energy * best.sum((1, 2, 3))).clamp_min(1.0),
    )


def correct(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """Say strictly which videos `[B, F, H, W, 3]` show the prompt's colour and shape: bool `[B]`.

    A hit is a shape present in every frame, whose colour is nearer to the asked one than to any other and at most 60
    away, and whose outline overlaps the asked shape by at least 0.75 and no other shape better. Motion plays no part.
    Every prompt must name a scene.
    """
    scenes = [parse_prompt(prompt) for prompt in prompts]
    seen = measure(videos)
    distance = torch.cdist(seen.colour, torch.tensor(list(COLOURS.values()), dtype=torch.float32))
    colours = torch.tensor([list(COLOURS).index(scene.colour) for scene in scenes])
    shapes = torch.tensor([list(SHAPES).index(scene.shape) for scene in scenes])
    right_colour = (distance.argmin(1) == colours) & (distance.amin(1) <= 60)
    right_shape = (seen.overlap.argmax(1) == shapes) & (seen.overlap.amax(1) >= 0.75)
    return right_colour & right_shape & (seen.presence > 0.5)


@register_reward("moving_shapes")
class MovingShapesReward(RewardModel):
    """Score videos of moving shapes against their prompts, each metric near zero mean and unit spread on base samples.

    Example: `MovingShapesReward()(videos, ["a red circle moves slowly to the left"])["TA"]` is a float32 `[1]`.
    """

    metrics = ("VQ", "MQ", "TA")

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score uint8 videos `[B, F, H, W, 3]`: metric -> float32 `[B]`, NaN for a prompt that names no scene."""
        scenes = [parse_prompt(prompt) for _, prompt in zip(videos, prompts, strict=True)]
        any_scene = Scene("red", "circle", "left", "slowly")  # in the place of what failed, whose scores are dropped
        raw = raw_scores(measure(videos), [scene or any_scene for scene in scenes])
        failed = torch.tensor([scene is None for scene in scenes])
        return {
            metric: ((raw[metric] - mean) / spread).masked_fill(failed, math.nan)
            for metric, (mean, spread) in CALIBRATION.items()
        }


def raw_scores(seen: Measurement, scenes: Sequence[Scene]) -> dict[str, Tensor]:
    """Raw VQ, MQ and TA in [0, 1], float32 `[B]` each; 1 is a perfect rendering of the scene."""
    quality = (-torch.log10(seen.unexplained + 1e-3) / 2.5).clamp(0, 1)
    distance = torch.cdist(seen.colour, torch.tensor(list(COLOURS.values()), dtype=torch.float32))
    colours, shapes = ([list(COLOURS).index(s.colour) for s in scenes], [list(SHAPES).index(s.shape) for s in scenes])
    colour = _clarity((1 - distance / 240).clamp(0, 1), -distance / 20, colours)
    shape = _clarity(seen.overlap, seen.overlap / 0.04, shapes)
    return {
        "VQ": seen.presence * quality,
        "MQ": seen.presence * _motion_score(seen.centre, scenes),
        "TA": seen.presence * (colour + shape) / 2,
    }


def _shape_offset(offset: Tensor) -> Tensor:
    """Colour of the shape minus background `[B, 3]`: mean over the pixels that differ from it most clearly."""
    distance = offset.square().sum(-1).sqrt().flatten(1)
    top = distance.kthvalue(max(1, round(0.985 * distance.shape[1])), dim=1).values
    chosen = (distance > 0.6 * top[:, None]) & (distance > 20)
    return (offset.flatten(1, 3) * chosen[..., None]).sum(1) / chosen.sum(1, keepdim=True).clamp_min(1)


def _presence(share: Tensor, contrast: Tensor) -> Tensor:
    """How plausible size (`share` of the frame, `[B, F]`) and contrast (`[B]`, 0-441) are, in [0, 1]: `[B]`."""
    low, high = AREA_RANGE
    grown = ((share - 0.3 * low) / (0.7 * low)).clamp(0, 1)
    bounded = ((2 * high - share) / high).clamp(0, 1)
    return torch.minimum(grown, bounded).mean(1) * ((contrast - 20) / 40).clamp(0, 1)


def _motion_score(centre: Tensor, scenes: Sequence[Scene]) -> Tensor:
    """Agreement of the straight-line motion with the asked one, times smoothness, in [0, 1]: `[B]`."""
    asked = torch.tensor([MOTIONS[scene.motion] for scene in scenes], dtype=torch.float32)
    speed = torch.tensor([SPEEDS[scene.speed] / VIDEO_FPS for scene in scenes])
    asked = asked / asked.norm(dim=1, keepdim=True) * speed[:, None]  # per frame, as a share of the frame
    time = torch.arange(centre.shape[1]) - (centre.shape[1] - 1) / 2  # from the middle of the video
    middle = centre.mean(1, keepdim=True)
    velocity = (time[:, None] * (centre - middle)).sum(1) / time.square().sum().clamp_min(1e-6)
    jitter = (centre - middle - velocity[:, None] * time[:, None]).square().sum(-1).mean(1).sqrt()
    miss = ((velocity - asked).norm(dim=1) / speed - 0.12).clamp_min(0)
    return torch.exp(-miss / 0.7 - jitter / 0.015)


def _clarity(nearness: Tensor, logits: Tensor, asked: Sequence[int]) -> Tensor:
    """How clearly one of N, `[B, N]`, is the asked one, in [0, 1]: half nearness, half distinction from the others."""
    chosen = torch.tensor(asked)[:, None]
    return (nearness.gather(1, chosen)[:, 0] + torch.softmax(logits, dim=1).gather(1, chosen)[:, 0]) / 2
