"""What training changed in videos besides their reward: their looks, and how alike they became, pair by pair.

The looks are measured from the frames, without any network. Videos of the same prompts and seeds are compared before
and after training, as the reward is, so that a loss shows which the reward does not measure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic_core import to_json
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from hyvideo.data.files import replace_synced
from hyvideo.evaluation.intervals import Interval, seed_interval
from hyvideo.evaluation.paired import Pair

DRIFT = "drift.json"
"""File of a run folder: the newest `Drift` since training began, and after which update."""

LOOKS = {
    "brightness": "mean luminance",
    "contrast": "spread of luminance within a frame",
    "saturation": "mean difference of a pixel's largest and smallest channel",
    "hue_spread": "how far the strong hues of a frame differ: 0 for one hue, 1 for opposite ones",
    "sharpness": "mean absolute Laplacian of luminance",
    "motion": "mean motion of contours across themselves, in frame widths per frame, whatever their contrast",
    "direction_x": "how far motion points to the right: -1 to 1",
    "direction_y": "how far motion points downwards: -1 to 1",
    "flicker": "mean absolute second difference in time of a frame's luminance",
    "border": "median luminance of the outermost sixteenth of the frame: the background",
}
"""Look -> what is measured, of luminance and channels in [0, 1]."""

ALPHA = 0.05
"""Largest probability that any interval of a comparison misses its value."""

FLOOR = dict.fromkeys(LOOKS, 1e-4) | dict.fromkeys(("motion", "flicker"), 1e-5)
"""Standard deviation below which a look does not vary: a fortieth of a grey level; less where all values are small."""

NEGLIGIBLE = 0.2
"""Change that is not named: a fifth of the base's standard deviation, or of a spread."""

_PALE = 0.1
"""Saturation up to which a pixel has no hue."""

_SLOW = 1e-3
"""Motion in frame widths per frame whose direction counts half."""

_STILLS, _SIDE = 8, 64  # frames for what needs all their pixels, and shorter side for what needs all frames


def looks_of(videos: Tensor) -> list[dict[str, float]]:
    """Measure LOOKS of each of B uint8 videos `[B, F, H, W, 3]`.

    Colours and sharpness are of 8 frames spread over a video, motion and flicker of all, which are made smaller.
    """
    return [{name: round(value, 6) for name, value in _looks(video).items()} for video in videos]


def _looks(video: Tensor) -> dict[str, float]:
    """Measure one video `[F, H, W, 3]`."""
    frames, height, width, _ = video.shape
    chosen = torch.linspace(0, frames - 1, min(_STILLS, frames)).round().long()
    stills = video[chosen.to(video.device)].cpu().float() / 255
    luma = _luminance(stills)
    chroma = stills.amax(-1) - stills.amin(-1)
    red, green, blue = stills.unbind(-1)
    hue = torch.stack([red - (green + blue) / 2, math.sqrt(0.75) * (green - blue)], -1)  # its angle, times chroma
    hue = hue * (1 - _PALE / hue.norm(dim=-1, keepdim=True).clamp_min(_PALE))  # grains of colour on grey do not count
    strength = hue.norm(dim=-1).mean((1, 2))
    inner = luma[:, 1:-1, 1:-1]
    around = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] + luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:]
    rim = max(1, min(height, width) // 16)
    border = [luma[:, :rim], luma[:, -rim:], luma[:, :, :rim], luma[:, :, -rim:]]
    every = max(1, min(height, width) // (2 * _SIDE))
    small = _luminance(video[:, ::every, ::every].cpu().float() / 255)
    shrink = max(1.0, min(small.shape[1:]) / _SIDE)
    small = adaptive_avg_pool2d(small[:, None], [max(1, round(side / shrink)) for side in small.shape[1:]])[:, 0]
    means = small.mean((1, 2))
    motion, direction_x, direction_y = _motion(small)
    return {
        "brightness": float(luma.mean()),
        "contrast": float(luma.flatten(1).std(1, correction=0).mean()),
        "saturation": float(chroma.mean()),
        "hue_spread": float(((strength - hue.mean((1, 2)).norm(dim=-1)) / strength.clamp_min(0.005)).mean()),
        "sharpness": float((4 * inner - around).abs().mean()) if inner.numel() else 0.0,
        "motion": motion,
        "direction_x": direction_x,
        "direction_y": direction_y,
        "flicker": float(means.diff(n=2).abs().mean()) if frames > 2 else 0.0,
        "border": float(torch.cat([part.flatten() for part in border]).median()),
    }


def _luminance(pixels: Tensor) -> Tensor:
    """Luminance (Rec. 709) of `[..., 3]`."""
    return pixels @ torch.tensor([0.2126, 0.7152, 0.0722])


def _motion(frames: Tensor) -> tuple[float, float, float]:
    """Measure the motion in `[F, h, w]`: its amount, and how far it points to the right and downwards.

    The amount is how far contours move across themselves in a frame's time, in widths: the spread of the change of
    brightness over the frame, per gradient. So neither faint contours count, nor a frame that becomes brighter as a
    whole; and beyond a thirtieth of the width a faster object counts no more. The direction is of the one displacement
    that explains a pair of frames by their gradients (Lucas and Kanade 1981), 0 without motion.
    """
    if len(frames) < 2 or min(frames.shape[1:]) < 2:
        return 0.0, 0.0, 0.0
    middle, change = (frames[1:] + frames[:-1]) / 2, frames.diff(dim=0)
    y, x = (gradient.flatten(1) for gradient in torch.gradient(middle, dim=(1, 2)))
    change = change.flatten(1)
    xx, yy, xy = ((a * b).mean(1) + ridge for a, b, ridge in ((x, x, 1e-6), (y, y, 1e-6), (x, y, 0.0)))
    of_x, of_y, area = -(x * change).mean(1), -(y * change).mean(1), xx * yy - xy * xy
    across = (change.var(1, correction=0) / (xx + yy)).sqrt()
    moved = torch.stack([across, (yy * of_x - xy * of_y) / area, (xx * of_y - xy * of_x) / area])
    amount, right, down = (moved.mean(1) / frames.shape[2]).tolist()
    length = math.hypot(right, down) + _SLOW
    return amount, right / length, down / length


@dataclass(frozen=True)
class Change:
    """How one look changed between two sets of videos of the same prompts and seeds, with corrected intervals.

    Attributes:
        before, after: means over the videos.
        shift: mean paired change, in standard deviations of the first set's videos.
        spread: relative change of the mean difference of two prompts: -0.5 where half of it is gone (collapse).
        siblings: the same of two videos of a prompt; None where no prompt has two.
    """

    before: float
    after: float
    shift: Interval
    spread: Interval
    siblings: Interval | None = None

    def parts(self) -> dict[str, Interval]:
        """What may have changed, by its name's ending: ``""``, ``"_spread"`` and, with siblings, ``"_siblings"``."""
        parts = {"": self.shift, "_spread": self.spread, "_siblings": self.siblings}
        return {ending: part for ending, part in parts.items() if part}

    def clear(self) -> dict[str, float]:
        """Return the size of those of `parts` whose whole interval is larger than NEGLIGIBLE.

        That of a spread is its change relative to the mean of both sides, so doubled is as much as halved.
        """
        clear = {ending: part.mean for ending, part in self.parts().items() if max(part.low, -part.high) > NEGLIGIBLE}
        return {ending: abs(2 * mean / (2 + mean) if ending else mean) for ending, mean in clear.items()}

    def in_words(self, name: str) -> str:
        """Say what changed clearly, such as `border's spread -55 %`; empty if nothing did."""
        nouns = {"": "{} {:+.2f} base std", "_spread": "{}'s spread {:+.0%}", "_siblings": "{} among siblings {:+.0%}"}
        parts = {ending: nouns[ending].format(name, self.parts()[ending].mean) for ending in self.clear()}
        return ", ".join(parts.values()).replace("%", " %")


@dataclass(frozen=True)
class Drift:
    """How two sets of videos differ in all LOOKS. The look with the largest clear change comes first.

    Attributes:
        changes: by look. All their intervals together miss a value with a probability of at most ALPHA (Bonferroni).
        level: probability that one of the intervals holds its value.
        most_changed: numbers of the three pairs whose looks moved farthest, each look in the first set's
            standard deviations.
        num_pairs, num_prompts: pairs of videos, and their prompts.
    """

    changes: dict[str, Change]
    level: float
    most_changed: tuple[int, ...]
    num_pairs: int
    num_prompts: int

    def __str__(self) -> str:
        said = [words for name, change in self.changes.items() if (words := change.in_words(name))]
        more = [f"and {len(said) - 3} more"] if len(said) > 3 else []
        return "; ".join(said[:3] + more) or "no look clearly changed"

    @property
    def siblings(self) -> bool:
        """Whether a prompt has more than one video."""
        return self.num_prompts < self.num_pairs

    def metrics(self) -> dict[str, float]:
        """Return `drift/LOOK`, `drift/LOOK_spread` and, where prompts have siblings, `drift/LOOK_siblings`."""
        every = (
            (look, ending, part) for look, change in self.changes.items() for ending, part in change.parts().items()
        )
        return {f"drift/{look}{ending}": part.mean for look, ending, part in every}


def drift_of(pairs: Sequence[Pair]) -> Drift | None:
    """Compare pairs of videos whose looks were measured; None where not all were, or there are fewer than 3 prompts."""
    sides = list(zip(*pairs, strict=True))
    known = all(math.isfinite(video.looks.get(name, math.nan)) for pair in pairs for video in pair for name in LOOKS)
    prompts = [video.prompt for video in sides[0]] if sides else []
    if not known or len({*prompts}) < 3:
        return None
    return drift(*([video.looks for video in side] for side in sides), prompts)


def drift(before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]], prompts: Sequence[str]) -> Drift:
    """Compare the looks of N videos before and after training, pair by pair; N texts say which are of one prompt.

    Intervals are over the P prompts, because videos of one prompt are not independent. A spread is the mean absolute
    difference of two prompts' means, or of two videos of a prompt (Gini's), which one odd video does not decide. Fewer
    than 3 prompts are a ValueError.
    """
    _, prompt = np.unique(np.asarray(prompts), return_inverse=True)
    counts = np.bincount(prompt)
    if len(counts) < 3:
        raise ValueError(f"Drift needs videos of at least 3 prompts, received {len(counts)}.")
    siblings = counts.max() > 1
    level = 1 - ALPHA / (len(LOOKS) * (3 if siblings else 2))
    others, same = ~np.eye(len(counts), dtype=bool), (prompt[:, None] == prompt) & ~np.eye(len(prompt), dtype=bool)
    changes, moved = {}, np.zeros(len(prompt))
    for name in LOOKS:
        old, new = (np.array([video[name] for video in side]) for side in (before, after))
        unit = max(float(old.std(ddof=1)), FLOOR[name])
        moved += ((new - old) / unit) ** 2
        means = [np.bincount(prompt, weights=values) / counts for values in (old, new)]
        over = [_differences(mean, others) for mean in means]
        inner = [np.bincount(prompt, weights=_differences(values, same)) / counts for values in (old, new)]
        changes[name] = Change(
            before=float(old.mean()),
            after=float(new.mean()),
            shift=seed_interval((means[1] - means[0]) / unit, level),
            spread=_relative(*over, level, 2, FLOOR[name]),
            siblings=_relative(*inner, level, 1, FLOOR[name]) if siblings else None,
        )
    largest = dict(sorted(changes.items(), key=lambda item: -max(item[1].clear().values(), default=0)))
    return Drift(largest, level, tuple(np.argsort(-moved, kind="stable")[:3].tolist()), len(prompt), len(counts))


def _differences(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Mean absolute difference of each of N values from those `others` `[N, N]` that count for it, 0 without any."""
    return (np.abs(values[:, None] - values) * others).sum(1) / others.sum(1).clip(1)


def _relative(before: np.ndarray, after: np.ndarray, level: float, weight: int, floor: float) -> Interval:
    """Relative change of a mean difference, to which P prompts add `[P]`, with the interval of the jackknife.

    Leaving out a prompt takes `weight` of those that are averaged: 2 where prompts are compared with each other. The
    interval is that of (new - old) / (new + old), which treats rise and fall alike; its upper end may be infinite. The
    floor is added to both sides.
    """
    sides, count = (before + floor, after + floor), len(before)
    old, new = (np.array([side.mean(), *(count * side.mean() - weight * side) / (count - weight)]) for side in sides)
    whole, *without = (new - old) / (new + old)
    found = seed_interval(whole + (count - 1) * (np.mean(without) - without), level)
    ends = np.clip([found.mean, found.low, found.high], -1 + 1e-9, 1 - 1e-9)
    mean, low, high = map(float, (1 + ends) / (1 - ends) - 1)
    return Interval(mean, low, high if found.high < 1 else math.inf, found.num)


def write_drift(folder: Path, updates: int, drifted: Drift) -> None:
    """Write to a run folder what its videos changed until so many updates; an infinite end of an interval is null."""
    facts = {"updates": updates, "named": str(drifted)} | asdict(drifted)
    replace_synced(folder / DRIFT, to_json(facts, indent=1, inf_nan_mode="null") + b"\n")
