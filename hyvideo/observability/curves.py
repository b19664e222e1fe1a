"""Long curves made short enough to draw: smoothing and downsampling."""

import numpy as np


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` neighbours of [N] values, fewer at the ends; NaNs are left out, [N] out."""
    half = window // 2
    finite, ones = np.isfinite(values), np.ones(2 * half + 1)
    counts, sums = (
        np.convolve(np.pad(part, half), ones, "valid") for part in (finite.astype(float), np.where(finite, values, 0.0))
    )
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def smooth(values: np.ndarray) -> np.ndarray:
    """Smooth [N] values over a tenth of them: a moving average taken twice, so that no zigzag of a round is left.

    Fewer than 10 values are left as they are.
    """
    if len(values) < 10:
        return values
    half = (max(3, len(values) // 10) | 1) // 2 + 1
    return moving_average(moving_average(values, half), half)


def evenly_spaced(num_points: int, limit: int) -> np.ndarray:
    """At most `limit` indices spread over `num_points`, the first and the last among them."""
    return np.unique(np.linspace(0, max(num_points - 1, 0), min(num_points, limit)).round().astype(int))


def extremes(values: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` indices into [N] values that keep every spike: the least and the greatest of each stretch."""
    if len(values) <= limit:
        return np.arange(len(values))
    kept = []
    for stretch in np.array_split(np.arange(len(values)), limit // 2):
        finite = stretch[np.isfinite(values[stretch])]
        kept += [finite[values[finite].argmin()], finite[values[finite].argmax()]] if len(finite) else [stretch[0]]
    return np.unique(kept)
