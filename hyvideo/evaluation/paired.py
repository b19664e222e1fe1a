"""Is a trained model better than its base? Paired comparison on the same prompts and seeds, with its uncertainty."""

import numpy as np
from numpy.typing import ArrayLike

from hyvideo.evaluation.intervals import bootstrap_interval
from hyvideo.observability.verdict import Gain


def paired_gain(before: ArrayLike, after: ArrayLike, num_resamples: int = 10_000, seed: int = 0) -> Gain:
    """Compare scores of the same prompts and seeds before and after training.

    The interval is the percentile bootstrap over pairs: N pairs are drawn with replacement and their mean difference is
    taken, `num_resamples` times; below 30 pairs it is Student's t. Both assume that pairs are independent, so give
    every pair its own seed.

    Args:
        before: scores of the base [N]; NaN marks a failed score.
        after: scores of the trained model [N], same order.
        num_resamples: bootstrap draws.
        seed: of the bootstrap; the same input gives the same interval.

    Raises:
        ValueError: shapes differ or are not [N], a score is infinite, or fewer than 2 whole pairs remain.
    """
    before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if before.ndim != 1 or before.shape != after.shape:
        raise ValueError(f"Expected two score lists [N] of one length, received {before.shape} and {after.shape}.")
    if np.isinf(before).any() or np.isinf(after).any():
        raise ValueError("A score is infinite: expected finite scores, or NaN for a failed one.")
    whole = ~(np.isnan(before) | np.isnan(after))
    num_pairs = int(whole.sum())
    if num_pairs < 2:
        raise ValueError(f"Expected at least 2 pairs without NaN, received {num_pairs} of {len(before)}.")
    first, second = before[whole], after[whole]
    base_std = first.std(ddof=1)
    interval = bootstrap_interval(second - first, num_resamples, seed)
    return Gain(
        before=float(first.mean()),
        after=float(second.mean()),
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        in_base_std=float(interval.mean / base_std) if base_std > 0 else float("nan"),
        num_pairs=num_pairs,
        num_left_out=len(before) - num_pairs,
    )
