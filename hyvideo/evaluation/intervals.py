"""Intervals: of a mean over videos (bootstrap; of few, Student's t) or training seeds (Student's t), and of a share."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

_NUM_RESAMPLES = 10_000
_RESAMPLED_VALUES_AT_ONCE = 2**22
_ENOUGH_TO_RESAMPLE = 30


@dataclass(frozen=True)
class Interval:
    """A mean, NaN of no values, with its 95 % interval, NaN of one value; `num` were averaged, NaNs left out."""

    mean: float
    low: float
    high: float
    num: int

    def __str__(self) -> str:
        if self.num == 0:
            return "none scored"
        if math.isnan(self.low):
            return f"{self.mean:+.3f} [no interval from {self.num}]"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def bootstrap_interval(values: ArrayLike) -> Interval:
    """Percentile bootstrap of the mean of independent values [N], NaNs left out; below 30 of them Student's t interval.

    Of so few the bootstrap is too narrow: its 95 % interval covers the mean in 85 % of studies of five normal values,
    89 % of eight, 92 % of 16 and 94 % of 32. The same values give the same interval. An infinite one is a ValueError.
    """
    values = _finite(values)
    if len(values) < _ENOUGH_TO_RESAMPLE:
        return seed_interval(values)
    low, high = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=_NUM_RESAMPLES,
        batch=max(1, _RESAMPLED_VALUES_AT_ONCE // len(values)),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(float(values.mean()), float(low), float(high), len(values))


def seed_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """Student's t interval, at a `level`, of the mean of values [N], one per seed of a run; NaN marks a missing run.

    One value gives a mean without an interval, none gives NaN; an infinite one is a ValueError.
    """
    values = _finite(values)
    mean = float(values.mean()) if len(values) else math.nan
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan, len(values))
    half_width = float(stats.t.ppf((1 + level) / 2, len(values) - 1) * stats.sem(values))
    return Interval(mean, mean - half_width, mean + half_width, len(values))


def _finite(values: ArrayLike) -> np.ndarray:
    """The values [N] as float64 without the NaNs."""
    values = np.asarray(values, dtype=np.float64)
    if np.isinf(values).any():
        raise ValueError("A score is infinite: expected finite scores, or NaN for a failed one.")
    return values[~np.isnan(values)]


def wilson_interval(rate: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share of `count` trials: within [0, 1], and of some width even at 0 and 1."""
    z = stats.norm.ppf(0.975)
    centre = (rate + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))
    low, high = max(0.0, float(centre - half)), min(1.0, float(centre + half))
    return min(low, rate), max(high, rate)  # rounding must not leave a rate of 0 or 1 out
