"""Several models on the same prompts and seeds: means, paired gains and win rates, all with intervals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hyvideo.evaluation.intervals import Interval, bootstrap_interval, wilson_interval

OVERALL = "Overall"


@dataclass(frozen=True)
class Comparison:
    """What the scores of M models say.

    A prompt with several seeds counts once, with the mean of its videos: videos of one prompt are not independent, so
    intervals are over prompts (bootstrap, below 30 Student's t; Wilson's for win rates).

    Attributes:
        means: model -> metric -> mean over prompts.
        gains: model -> metric -> mean difference to the first model, of videos of the same prompt and seed.
        win_rates: metric -> model -> other model -> share of prompts and seeds at which it scores higher; a tie is half
            a win.
        num_failed: model -> metric -> videos without a score; they are left out.
        num_prompts: prompts.
        num_videos: videos of each model.
    """

    means: Mapping[str, Mapping[str, Interval]]
    gains: Mapping[str, Mapping[str, Interval]]
    win_rates: Mapping[str, Mapping[str, Mapping[str, Interval]]]
    num_failed: Mapping[str, Mapping[str, int]]
    num_prompts: int
    num_videos: int


def compare(
    scores: Mapping[str, Mapping[str, np.ndarray]], rows: np.ndarray, judged: Mapping[str, np.ndarray] | None = None
) -> Comparison:
    """Compare models by their scores: model -> metric -> [N] scores of its videos, NaN for a failed one.

    All have the same N prompts and seeds in the same order; the first model is the one the others are compared with.
    `rows` [N] say which prompt each video is of. `judged` has for a metric [N], whether it judges such a prompt at all
    (None: all do); other NaNs are failures.
    """
    models = list(scores)
    metrics = list(scores[models[0]])

    def win_rate(own: np.ndarray, other: np.ndarray) -> Interval:
        """Share of wins of [N] scores over [N] others; Wilson's interval for as many prompts."""
        wins = np.where(np.isnan(own - other), np.nan, (own > other) + 0.5 * (own == other))
        of_prompts = _of_prompts(wins, rows)
        if len(of_prompts) == 0:
            return Interval(math.nan, math.nan, math.nan, 0)
        rate = float(of_prompts.mean())
        return Interval(rate, *wilson_interval(rate, len(of_prompts)), len(of_prompts))

    return Comparison(
        means={m: {name: _over_prompts(scores[m][name], rows) for name in metrics} for m in models},
        gains={
            m: {name: _over_prompts(scores[m][name] - scores[models[0]][name], rows) for name in metrics}
            for m in models[1:]
        },
        win_rates={
            name: {
                m: {other: win_rate(scores[m][name], scores[other][name]) for other in models if other != m}
                for m in models
            }
            for name in metrics
        },
        num_failed={
            m: {name: int((np.isnan(scores[m][name]) & (judged[name] if judged else True)).sum()) for name in metrics}
            for m in models
        },
        num_prompts=len(np.unique(rows)),
        num_videos=len(rows),
    )


def with_overall(
    scores: Mapping[str, np.ndarray], weights: Mapping[str, float], judged: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Put the weighted sum first, as `Overall`; a metric that does not judge a prompt counts 0 there, as in training.

    It is NaN where a weighted metric failed, and where `judged[OVERALL]` says that none judges the prompt.
    """
    total = sum(weight * np.where(judged[name], scores[name], 0.0) for name, weight in weights.items())
    return {OVERALL: np.where(judged[OVERALL], total, math.nan), **scores}


def _over_prompts(values: np.ndarray, rows: np.ndarray) -> Interval:
    """Average [N] values within prompts, then over prompts; without an interval where fewer than 2 have a score."""
    return bootstrap_interval(_of_prompts(values, rows))


def _of_prompts(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Mean of each prompt's values, NaNs left out: [P] of the prompts that have any."""
    there = ~np.isnan(values)
    _, place = np.unique(rows[there], return_inverse=True)
    return np.bincount(place, weights=values[there]) / np.bincount(place)
