"""What a run is expected to gain, from trial steps along the gradients of some rounds.

The model has three parts. What training can gain at most is what the best video of a group has more than the group's
mean. How fast it comes there is what a short step along some rounds' gradient gains on held-out prompts. What it costs
is what a random walk loses, since most of each update is noise; learning pulls this walk back.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hyvideo.algorithms.optimizer import set_learning_rate
from hyvideo.config.schema import Config
from hyvideo.evaluation.intervals import Interval

ADAM_OVER_SIGN = math.sqrt(math.pi / 2)
"""How far Adam's later steps follow a weak signal in normal noise, as a multiple of its first step, which is a sign."""


@dataclass(frozen=True)
class Outlook:
    """What a run at one learning rate is expected to gain on held-out prompts, in the reward's unit.

    Attributes:
        rate: learning rate.
        length: of each weight's random walk over the run, ``sqrt(sum of squared rates)``, which the trial steps have.
        taught: what the direction of a trial step gains: half the difference between a step up and one down.
        spoilt: what the size of a trial step loses: the mean loss of the two.
        gain: of the whole run.
    """

    rate: float
    length: float
    taught: Interval
    spoilt: Interval
    gain: Interval


def walk(config: Config, rate: float, first: int = 0, scale: float = 1.0) -> tuple[float, float]:
    """Return the sum of a run's learning rates after update `first`, and the root of the sum of their squares.

    `rate` takes the place of the configured one, and is warmed up like it; all are times `scale`, which is below 1
    after a rollback.
    """
    optimizer, updates = replace(config.optimizer, learning_rate=rate), range(first, config.run.max_steps)
    rates = np.array([set_learning_rate([], optimizer, update, scale) for update in updates])
    return float(rates.sum()), float(np.sqrt(np.square(rates).sum()))


def outlook_of(
    config: Config,
    rate: float,
    base: np.ndarray,
    tried: Mapping[float, np.ndarray],
    most: float,
    first: int,
    rounds_per_half: float,
    scale: float = 1.0,
) -> Outlook:
    """Work out what a run at one of the tried rates is expected to gain, with the slope that the smallest one shows.

    `base` are the held-out rewards `[N]` of the policy as it is, with NaN for a failed score, and `tried` those
    `[H, 2, N]` after a step up and one down along the gradients of H halves of `rounds_per_half` rounds each. A run can
    gain `most` at most, has made `first` updates already, and makes the others at `scale` times its rate. Intervals
    resample halves and videos. Every mean is over the videos whose scores it needs are all there, of each half by
    itself; of so few that a resample has none, there is no interval.
    """
    order = sorted(tried)
    taught, slope = ((tried[of][:, 0] - tried[of][:, 1]) / 2 * (rate / of) for of in (rate, order[0]))
    parts = np.array([taught, slope, *(base - tried[of].mean(1) for of in order)])
    parts = parts[..., np.isfinite(parts).any((0, 1))]
    rng, own = np.random.default_rng(0), order.index(rate)
    halves, videos = (rng.integers(0, count, (2000, count)) for count in parts.shape[1:])
    drawn = _means(parts[:, halves[:, :, None], videos[:, None]])
    travelled, length = walk(config, rate, first, scale)
    follows = ADAM_OVER_SIGN * travelled / length / math.sqrt(config.grpo.updates_per_rollout * rounds_per_half)
    spans = list(pairwise([0.0, *((of / rate) ** 2 for of in order)]))

    def told(means: np.ndarray) -> np.ndarray:
        """Return what is taught and spoilt, and the gain, `[3]` or `[3, D]`, by means `[2 + R]` or D times as many."""
        taught, slope, *spoilt = means
        losses = np.diff([np.zeros_like(slope), *spoilt], axis=0)
        losses[own + 1 :] = np.nan_to_num(losses[own + 1 :])  # the walk does not come to what longer steps lose

        def lost(square: np.ndarray) -> np.ndarray:
            """What a walk loses lies between what the steps around its length lose."""
            return sum(loss * np.clip((square - a) / (b - a), 0, 1) for loss, (a, b) in zip(losses, spans, strict=True))

        return np.array([taught, spoilt[own], expected_gain(follows * slope, lost, most)])

    ends = np.percentile(told(drawn), (2.5, 97.5), axis=1).T.tolist()
    counts = np.isfinite(parts).sum((1, 2)) // len(parts[0])
    counted = [counts[0], counts[2 + own], counts[: 3 + own].min()]
    means = zip(told(_means(parts)), ends, counted, strict=True)
    return Outlook(rate, length, *(Interval(float(mean), *both, int(count)) for mean, both, count in means))


def _means(values: np.ndarray) -> np.ndarray:
    """Return the means over the last two dims of what is finite; NaN of nothing."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(finite, values, 0.0).sum((-2, -1)) / finite.sum((-2, -1))


def expected_gain(signal: np.ndarray, spoilt: Callable[[np.ndarray], np.ndarray], most: float) -> np.ndarray:
    """Return ``most (1 - exp(-n)) - spoilt(x)`` with ``n = signal / most`` and ``x' = 1 - n x (1 + spoilt(x) / most)``.

    `signal` is what the run would gain if it learnt as fast as in its first update all the time. Learning slows down as
    there is less to be found. A walk of squared length x, as a share of the whole walk's, loses `spoilt`. Learning
    pulls it back, the more so the more there is to be found again. A signal below 0 only loses. Signals may have any
    shape, and `spoilt` gets and returns arrays of the same.
    """
    most, step = max(most, 1e-12), 1 / 200
    n, square = np.maximum(signal / most, 0.0), np.zeros_like(signal)
    for _ in range(200):  # backward Euler, because n may be large
        square = (square + step) / (1 + step * n * (1 + np.maximum(spoilt(square), 0.0) / most))
    return np.minimum(signal, 0.0) - most * np.expm1(-n) - spoilt(square)
