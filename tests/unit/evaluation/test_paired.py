"""The paired gain is right in its closed forms, and its interval covers the truth as often as it says."""

import math

import numpy as np
import pytest
import torch

from hyvideo.evaluation.paired import paired_gain


def test_a_constant_shift_has_an_interval_of_no_width_and_counts_in_the_bases_spread():
    before = np.array([0.0, 1.0, 2.0, 3.0])
    gain = paired_gain(before, before + 0.5)
    assert (gain.mean, gain.low, gain.high) == (0.5, 0.5, 0.5)
    assert gain.in_base_std == pytest.approx(0.5 / before.std(ddof=1))
    assert (gain.num_pairs, gain.num_left_out) == (4, 0)
    assert math.isnan(paired_gain([1.0, 1.0], [2.0, 3.0]).in_base_std), "a base that does not vary"


def test_the_interval_is_that_of_the_mean_of_the_differences():
    rng = np.random.default_rng(3)
    before = rng.normal(scale=10, size=400)  # pairing removes this spread
    difference = rng.normal(loc=0.2, size=400)
    gain = paired_gain(before, before + difference)
    half_width = 1.96 * difference.std() / math.sqrt(400)
    assert gain.low == pytest.approx(difference.mean() - half_width, abs=0.1 * half_width)
    assert gain.high == pytest.approx(difference.mean() + half_width, abs=0.1 * half_width)


@pytest.mark.parametrize("draw", ["normal", "exponential"])
def test_the_interval_covers_the_true_gain_in_about_95_percent_of_studies(draw, monkeypatch):
    monkeypatch.setattr("hyvideo.evaluation.intervals._NUM_RESAMPLES", 400)
    rng, true_gain, num_studies, covered = np.random.default_rng(0), 0.3, 400, 0
    for _ in range(num_studies):
        noise = getattr(rng, draw)(size=128) - (1.0 if draw == "exponential" else 0.0)
        gain = paired_gain(np.zeros(128), true_gain + noise)
        covered += gain.low <= true_gain <= gain.high
    assert 0.91 <= covered / num_studies <= 0.98


def test_a_pair_with_a_failed_score_on_either_side_is_left_out_and_counted():
    before = torch.tensor([0.0, math.nan, 2.0, 3.0])
    after = torch.tensor([1.0, 5.0, math.nan, 5.0])
    gain = paired_gain(before, after)
    assert (gain.mean, gain.num_pairs, gain.num_left_out) == (1.5, 2, 2)
    assert "2 pairs, 2 left out" in str(gain)


def test_the_same_scores_give_the_same_interval_whatever_is_resampled_at_once(monkeypatch):
    before, after = np.random.default_rng(4).normal(size=(2, 100))
    whole = paired_gain(before, after)
    monkeypatch.setattr("hyvideo.evaluation.intervals._RESAMPLED_VALUES_AT_ONCE", 7777)
    assert paired_gain(before, after) == whole


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([1.0, 2.0], [1.0, 2.0, 3.0], r"\(2,\) \(3,\)"),
        ([1.0, math.nan, 2.0], [math.nan, 1.0, 2.0], "at least 2 values that are not NaN, received 1"),
        ([1.0, math.inf], [1.0, 2.0], "infinite"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused_with_what_came(before, after, message):
    with pytest.raises(ValueError, match=message):
        paired_gain(before, after)
