"""Charts: places of points and ticks, gaps, logarithms, words."""

import json
import re

import numpy as np
import pytest

from scripts.reports.charts import (
    Chart,
    Line,
    decimals_for,
    draw,
    evenly_spaced,
    extremes,
    fixed,
    in_words,
    moving_average,
    signed,
    smooth,
)


def places(data):
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", data)]


def chart_of(x, y, **options):
    return draw(Chart("title", "about", [Line("a", np.array(x, float), np.array(y, float))], **options))


def line_of(drawing):
    """The path of its only curve."""
    (line,) = (stroke.data for stroke in drawing.strokes if stroke.kind == "line")
    return line


def test_points_lie_where_their_values_are():
    drawing = chart_of([0, 5, 10], [0.0, 1.0, 0.5])
    (x0, y0), (x1, y1), (x2, y2) = places(line_of(drawing))
    assert (x0, x1, x2) == (0, 500, 1000)
    assert y0 > y2 > y1  # down is low
    ticks = {label: place * 10 for place, label in drawing.y_ticks}
    assert ticks["0"] == pytest.approx(y0, abs=0.1)
    assert ticks["0.5"] == pytest.approx(y2, abs=0.1)


def test_a_missing_value_lifts_the_pen():
    drawing = chart_of([1, 2, 3, 4], [1.0, np.nan, 2.0, 3.0])
    assert [letter for letter in line_of(drawing) if letter in "ML"] == ["M", "M", "L"]
    assert json.loads(drawing.values)[0]["x"] == [1, 3, 4]


def test_a_value_between_missing_ones_is_a_dot():
    drawing = chart_of([1, 2, 3, 4, 5], [1.0, np.nan, 2.0, np.nan, 3.0])
    (dots,) = (stroke.data for stroke in drawing.strokes if stroke.kind == "dots")
    assert [round(x) for x, _ in places(dots)] == [0, 500, 1000]
    assert not [stroke for stroke in chart_of([1, 2, 3], [1.0, 2.0, 3.0]).strokes if stroke.kind == "dots"]


def test_lost_updates_are_shaded_and_no_curve_crosses_them():
    x, y = np.array([0.0, 1, 2, 8, 9, 10]), np.linspace(0, 1, 6)
    drawing = draw(Chart("title", "about", [Line("a", x, y, raw=y, gaps=[(3, 7)])]))
    strokes = {stroke.kind: stroke.data for stroke in drawing.strokes}
    for kind in ("line", "raw"):
        assert [letter for letter in strokes[kind] if letter in "ML"] == ["M", "L", "L", "M", "L", "L"]
    assert strokes["gap"] == "M200.0 0H800.0V1000H200.0Z"


def test_a_logarithmic_chart_spaces_powers_of_ten_evenly_and_leaves_zero_out():
    drawing = chart_of([1, 2, 3, 4], [0.0, 1e-4, 1e-2, 1.0], logarithmic=True)
    (_, a), (_, b), (_, c) = places(line_of(drawing))
    assert a - b == pytest.approx(b - c, abs=0.2)
    assert "0.01" in [label for _, label in drawing.y_ticks]


@pytest.mark.parametrize("values", [[0.0, 0.0], [3e-5, 3e-5], [-2.0, -2.0], [1e9, 1e-9]])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_flat_and_extreme_curves_are_drawn_within_the_chart(values, logarithmic):
    drawing = chart_of([1, 2], values, logarithmic=logarithmic)
    if drawing is None:
        assert logarithmic and max(values) <= 0
        return
    assert all(0 <= x <= 1000 and 0 <= y <= 1000 for x, y in places(line_of(drawing)))
    assert drawing.y_ticks


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("ends", [(185.1, 185.9), (3.98, 4.0), (0.6101, 0.6118), (120_400.0, 121_200.0)])
def test_labels_of_a_narrow_axis_differ(ends, logarithmic):
    labels = [label for _, label in chart_of([1, 2], ends, logarithmic=logarithmic).y_ticks]
    assert len(set(labels)) == len(labels) > 2


def test_a_curve_without_a_value_is_no_chart_and_a_single_one_is_a_dot():
    assert chart_of([1, 2], [np.nan, np.nan]) is None
    drawing = chart_of([7], [0.5])
    assert [stroke.kind for stroke in drawing.strokes] == ["line", "dots"]
    assert drawing.description == "title. a: 0.5 at update 7"


def test_five_thousand_updates_take_little_room():
    steps = np.arange(5000.0)
    noise = np.random.default_rng(0).normal(size=5000)
    drawing = draw(Chart("t", "a", [Line("", steps, noise, raw=noise, band=(noise - 1, noise + 1))]))
    assert sum(len(stroke.data) for stroke in drawing.strokes) + len(drawing.values) < 50_000


def test_more_curves_than_colours_differ_by_their_dash():
    lines = [Line(str(number), np.arange(2.0), np.full(2, float(number)), number) for number in range(14)]
    styles = [(colour, dash) for _, colour, dash in draw(Chart("t", "a", lines)).legend]
    assert len(set(styles)) == 14


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (0.4037, "0.404"), (-1.5, "−1.5"), (1234.5, "1234"), (999.7, "1000")),
        *((3e-5, "3e−5"), (2.5e7, "2.5e7"), (np.nan, "–")),
    ],
)
def test_numbers_are_written_briefly(value, text):
    assert in_words(value) == text


@pytest.mark.parametrize(
    ("value", "decimals", "text", "difference"),
    [
        *((0.4, 2, "0.40", "+0.40"), (-1.005, 3, "−1.005", "−1.00"), (-0.001, 2, "0.00", "0.00")),
        *((0.004, 2, "0.00", "0.00"), (12.0, 2, "12.00", "+12.00"), (np.nan, 2, "–", "–")),
    ],
)
def test_numbers_of_a_column_have_as_many_decimals(value, decimals, text, difference):
    assert (fixed(value, decimals), signed(value)) == (text, difference)


@pytest.mark.parametrize(("spread", "decimals"), [(40.0, 2), (1.0, 2), (0.1, 2), (0.05, 3), (1e-9, 6), (0.0, 2)])
def test_decimals_show_two_digits_of_the_spread(spread, decimals):
    assert decimals_for([1.0 - spread, 1.0 + spread, np.nan]) == decimals


def test_a_point_says_what_was_logged_beside_its_smoothed_value_and_its_interval():
    x, y = np.arange(12.0), np.linspace(0, 1, 12)
    smoothed = draw(Chart("t", "a", [Line("", x, y, raw=y + 1, band=(y - 1, y + 1))]))
    (line,) = json.loads(smoothed.values)
    assert (line["y"][-1], line["logged"][-1]) == ("1", "2")
    ends = json.loads(smoothed.ends)["y"]
    logged = [ends[1] - (ends[1] - ends[0]) * py / 1000 for _, py in line["means"]]
    np.testing.assert_allclose(logged, y + 1, atol=0.01)
    gains = draw(Chart("t", "a", [Line("", x, y, band=(y - 1, y + 1))], words=signed))
    assert json.loads(gains.values)[0]["y"][-1] == "+1.00 [0.00, +2.00]"
    short = draw(Chart("t", "a", [Line("", x[:3], y[:3], raw=y[:3])]))
    assert "logged" not in json.loads(short.values)[0], "nothing was smoothed"


def test_rounding_of_a_constant_is_drawn_as_a_constant():
    drawing = chart_of([1, 2, 3], [0.8, 0.8 + 1e-16, np.nextafter(0.8, 1)])
    assert len({round(y) for _, y in places(line_of(drawing))}) == 1


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
    assert extremes(np.array([1.0, np.nan, 2.0]), 10).tolist() == [0, 1, 2], "a short curve is kept whole"


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
    np.testing.assert_array_equal(smooth(np.array([1.0, 5.0, np.nan])), [1.0, 5.0, np.nan])  # too few to smooth
