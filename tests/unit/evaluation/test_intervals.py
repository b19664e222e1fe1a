"""Intervals cover the truth as often as they say: over many videos, and over five training seeds."""

import math

import numpy as np
import pytest

from hyvideo.evaluation.intervals import bootstrap_interval, seed_interval


def coverage(interval_of, size: int, num_studies: int = 1000) -> float:
    """Share of studies of `size` normal values whose interval holds the true mean, 0.3."""
    rng = np.random.default_rng(0)
    studies = [interval_of(0.3 + rng.normal(size=size)) for _ in range(num_studies)]
    return sum(study.low <= 0.3 <= study.high for study in studies) / num_studies


@pytest.mark.parametrize("size", [5, 8, 16])
def test_intervals_of_few_values_cover_the_mean(size):
    assert coverage(seed_interval, size) == pytest.approx(0.95, abs=0.02)
    assert coverage(bootstrap_interval, size) == pytest.approx(0.95, abs=0.02)


def test_from_thirty_values_on_an_interval_follows_their_shape():
    values = np.random.default_rng(0).exponential(size=30)
    interval, symmetric = bootstrap_interval(values), seed_interval(values)
    assert interval.high - interval.mean > 1.05 * (interval.mean - interval.low)
    assert bootstrap_interval(values[:29]) == seed_interval(values[:29]) and interval != symmetric


def test_students_interval_has_its_closed_form_and_a_single_seed_has_none():
    interval = seed_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0 and interval.num == 3
    assert interval.high - interval.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert interval.mean - interval.low == pytest.approx(interval.high - interval.mean)
    single = seed_interval([0.25])
    assert single.mean == 0.25 and math.isnan(single.low) and math.isnan(single.high)
    assert str(single) == "+0.250 [no interval from 1]"


@pytest.mark.parametrize("interval_of", [seed_interval, bootstrap_interval])
def test_missing_values_are_left_out(interval_of):
    assert interval_of([1.0, math.nan, 2.0, 6.0]) == interval_of([1.0, 2.0, 6.0])


@pytest.mark.parametrize(
    ("interval_of", "values", "message"),
    [
        (bootstrap_interval, [1.0, math.nan], "at least 2 values that are not NaN, received 1"),
        (bootstrap_interval, [1.0, math.inf], "infinite"),
    ],
)
def test_values_without_an_interval_are_refused(interval_of, values, message):
    with pytest.raises(ValueError, match=message):
        interval_of(values)
