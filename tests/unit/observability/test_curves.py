"""Curves are shortened without losing what matters."""

import numpy as np
import pytest

from hyvideo.observability.curves import evenly_spaced, extremes, moving_average, smooth


def test_moving_average_is_centred_shrinks_at_the_ends_and_skips_gaps():
    values = np.array([1.0, 2.0, np.nan, 4.0, 9.0])
    np.testing.assert_allclose(moving_average(values, window=3), [1.5, 1.5, 3.0, 6.5, 6.5])
    np.testing.assert_array_equal(moving_average(np.full(4, np.nan), window=3), np.full(4, np.nan))
    np.testing.assert_array_equal(moving_average(np.arange(5.0), window=1), np.arange(5.0))


def test_a_single_spike_of_a_long_curve_is_kept():
    values = np.sin(np.arange(5000) / 100)
    values[3217], values[41] = 50.0, np.nan
    kept = extremes(values, 400)
    assert len(kept) <= 400 and 3217 in kept
    assert np.all(np.diff(kept) > 0)


def test_short_curves_are_kept_whole_with_their_gaps():
    np.testing.assert_array_equal(extremes(np.array([1.0, np.nan, 2.0]), 10), [0, 1, 2])


@pytest.mark.parametrize(("num_points", "expected"), [(0, []), (1, [0]), (5, [0, 2, 4]), (2, [0, 1])])
def test_evenly_spaced_points_include_both_ends(num_points, expected):
    assert evenly_spaced(num_points, 3).tolist() == expected


@pytest.mark.parametrize(("num_points", "reach"), [(30, 2), (1000, 50), (5000, 250)])
def test_a_value_is_smoothed_over_a_tenth_of_the_curve(num_points, reach):
    spike = np.zeros(num_points)
    spike[num_points // 2] = 1.0
    assert np.flatnonzero(smooth(spike)).tolist() == list(range(num_points // 2 - reach, num_points // 2 + reach + 1))


def test_smoothing_removes_the_zigzag_of_two_updates_per_round_and_keeps_a_slope():
    steps = np.arange(100.0)
    smoothed = smooth(0.1 * steps + np.where(steps % 2, 1.0, -1.0))
    inner = slice(10, -10)
    np.testing.assert_allclose(smoothed[inner], 0.1 * steps[inner], atol=0.05)


def test_too_few_values_to_smooth_are_shown_as_they_are():
    np.testing.assert_array_equal(smooth(np.array([1.0, 5.0, np.nan])), [1.0, 5.0, np.nan])
