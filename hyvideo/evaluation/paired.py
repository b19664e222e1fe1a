"""Is a trained model better than its base? Paired comparison on the same prompts and seeds, with its uncertainty."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hyvideo.evaluation.intervals import Interval, bootstrap_interval
from hyvideo.observability.scored_videos import ScoredVideo

ENOUGH_PAIRS = 8
"""Below this many pairs an interval assumes more about the differences than they can show."""


Pair = tuple[ScoredVideo, ScoredVideo]
"""Videos of one prompt and seed, before and after."""


def pairs_of(before: Sequence[ScoredVideo], after: Sequence[ScoredVideo]) -> tuple[Pair, ...]:
    """Pair videos by number, prompt, and how they were sampled and scored."""
    earlier = {(video.path.name, video.prompt, video.how): video for video in before}
    keys = [(video.path.name, video.prompt, video.how) for video in after]
    return tuple((earlier[key], video) for key, video in zip(keys, after, strict=True) if key in earlier)


@dataclass(frozen=True)
class Gain:
    """How one score changed between two sets of videos of the same prompts and seeds.

    Attributes:
        before, after: means of both sets over the pairs.
        mean: mean paired difference, after minus before, in the score's own units.
        low, high: ends of the 95 % interval of `mean`.
        in_base_std: `mean` divided by the standard deviation of the first set's scores; NaN when these do not vary.
        num_pairs: pairs that were compared.
        num_left_out: pairs with a NaN on either side (a failed score), left out.
    """

    before: float
    after: float
    mean: float
    low: float
    high: float
    in_base_std: float
    num_pairs: int
    num_left_out: int

    def __str__(self) -> str:
        text = f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}], {self.in_base_std:+.2f} base std"
        left_out = f", {self.num_left_out} left out" if self.num_left_out else ""
        return f"{text}, {self.num_pairs} pairs{left_out}"

    @property
    def base_std(self) -> float:
        """Standard deviation of the first set's scores; NaN where no score changed or they do not vary."""
        return self.mean / self.in_base_std if self.in_base_std else math.nan

    @property
    def relative(self) -> Interval:
        """The gain and its interval in standard deviations of the first set's scores, or in their unit if unknown."""
        unit = self.base_std if math.isfinite(self.base_std) else 1.0
        return Interval(self.mean / unit, self.low / unit, self.high / unit, self.num_pairs)

    @property
    def unit(self) -> str:
        """What `relative` counts: `base std`, or nothing."""
        return "base std" if math.isfinite(self.base_std) else ""

    @property
    def direction(self) -> str:
        """`better`, `worse`, or `unclear` where the interval includes 0 or there are too few pairs."""
        if self.num_pairs < ENOUGH_PAIRS or self.low <= 0 <= self.high:
            return "unclear"
        return "better" if self.low > 0 else "worse"


@dataclass(frozen=True)
class PairedComparison:
    """Two sets of videos, such as "the base model", compared pair by pair.

    The gain of `reward` comes first, then each metric's. There are no pairs where only their numbers were kept.
    """

    before: str
    after: str
    gains: Mapping[str, Gain]
    pairs: Sequence[Pair] = ()


def paired_gain(before: ArrayLike, after: ArrayLike) -> Gain:
    """Compare scores [N] of the same prompts and seeds before and after training; NaN marks a failed score.

    The interval is `bootstrap_interval` of the differences. It assumes that pairs are independent, so give every pair
    its own seed. Infinite scores and fewer than 2 whole pairs are a ValueError.
    """
    before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    whole = ~(np.isnan(before) | np.isnan(after))
    num_pairs, first, second = int(whole.sum()), before[whole], after[whole]
    if num_pairs < 2:
        raise ValueError(f"A gain needs at least 2 pairs without NaN, received {num_pairs}.")
    interval = bootstrap_interval(second - first)
    base_std = first.std(ddof=1)
    return Gain(
        before=float(first.mean()),
        after=float(second.mean()),
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        in_base_std=float(interval.mean / base_std) if base_std > 0 else math.nan,
        num_pairs=num_pairs,
        num_left_out=len(before) - num_pairs,
    )
