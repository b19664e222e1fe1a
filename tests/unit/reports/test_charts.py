"""Charts: text stays text, gaps and spikes stay, colours follow the page, and long runs stay small."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from scripts.reports.charts import Line, draw, line_style, smooth
from scripts.reports.words import decimals_for, fixed, in_words, signed

SVG = "{http://www.w3.org/2000/svg}"


def chart_of(x, y, **options):
    return draw("title", "about", [Line("", np.array(x, float), np.array(y, float))], **options)


def texts(chart):
    return [text.text for text in ElementTree.fromstring(chart.picture).iter(f"{SVG}text")]


def curve(chart):
    """The path of its first curve: (letter, x, y)."""
    data = re.search(r'<g class="line">\s*<path d="([^"]*)"', chart.picture)[1]
    return [(letter, float(x), float(y)) for letter, x, y in re.findall(r"([ML]) (-?[\d.]+) (-?[\d.]+)", data)]


def test_points_lie_where_their_values_are_and_tell_them_to_whoever_points_at_them():
    chart = chart_of([0, 5, 10], [0.0, 1.0, 0.5])
    (_, x0, y0), (_, x1, y1), (_, x2, y2) = curve(chart)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 > y2 > y1  # down is low
    assert {"0", "0.5", "1", "5", "10", "update"} <= set(texts(chart))
    titles = [title.text for title in ElementTree.fromstring(chart.picture).iter(f"{SVG}title")]
    assert titles == ["update 0\n0", "update 5\n1", "update 10\n0.5"]
    assert chart.description == "title. 0 at update 0, 0.5 at update 10"


def test_a_missing_value_lifts_the_pen_a_lone_one_is_a_dot_and_without_any_there_is_no_chart():
    assert [letter for letter, _, _ in curve(chart_of([1, 2, 3, 4], [1.0, np.nan, 2.0, 3.0]))] == ["M", "M", "L"]
    assert chart_of([1, 2, 3, 4, 5], [1.0, np.nan, 2.0, np.nan, 3.0]).picture.count("<use ") == 3
    assert "<use " not in chart_of([1, 2, 3], [1.0, 2.0, 3.0]).picture
    assert chart_of([1, 2], [np.nan, np.nan]) is None
    chart = chart_of([7], [0.5])
    assert chart.picture.count("<use ") == 1 and chart.description == "title. 0.5 at update 7"


def test_lost_updates_are_shaded_and_no_curve_crosses_them():
    x, y = np.array([0.0, 1, 2, 8, 9, 10]), np.array([0.0, 3, 1, 2, 0, 4])
    chart = draw("title", "about", [Line("a", x, y, raw=y, gaps=[(3, 7)])])
    assert [letter for letter, _, _ in curve(chart)] == ["M", "L", "L", "M", "L", "L"]
    assert chart.picture.count('<g class="gap">') == 1


def test_a_logarithmic_chart_spaces_powers_of_ten_evenly_and_leaves_zero_out():
    chart = chart_of([1, 2, 3, 4], [0.0, 1e-4, 1e-2, 1.0], logarithmic=True)
    (_, _, a), (_, _, b), (_, _, c) = curve(chart)
    assert a - b == pytest.approx(b - c, abs=0.2) and "0.01" in texts(chart)
    assert chart_of([1, 2], [0.0, -1.0], logarithmic=True) is None


@pytest.mark.parametrize("values", [[0.0, 0.0], [3e-5, 3e-5], [-2.0, -2.0], [1e9, 1e-9], [0.8, np.nextafter(0.8, 1)]])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_flat_and_extreme_curves_are_drawn_and_labelled(values, logarithmic):
    if logarithmic and max(values) <= 0:
        return
    labels = texts(chart_of([1, 2], values, logarithmic=logarithmic))
    assert len(labels) > 4 and len(set(labels)) >= len(labels) - 2  # x and y may both have a 1 or 2


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("ends", [(185.1, 185.9), (3.98, 4.0), (0.6101, 0.6118), (120_400.0, 121_200.0)])
def test_labels_of_a_narrow_axis_differ(ends, logarithmic):
    labels = texts(chart_of([1, 2], ends, logarithmic=logarithmic))
    labels = labels[labels.index("update") + 1 :]
    assert len(set(labels)) == len(labels) > 2


def test_five_thousand_updates_take_little_room_and_keep_a_single_spike():
    steps, noise = np.arange(5000.0), np.random.default_rng(0).normal(size=5000)
    noise[3217] = 50.0
    chart = draw("t", "a", [Line("", steps, noise, raw=noise, band=(noise - 1, noise + 1))])
    heights = [y for _, _, y in curve(chart)]
    assert len(chart.picture) < 150_000 and np.mean(heights) - min(heights) > 100


def test_curves_take_colours_of_the_page_and_differ_by_their_dash_where_these_are_used_up():
    lines = [Line(f"<{number}>", np.arange(2.0), np.full(2, float(number)), number) for number in range(14)]
    chart = draw("t", "a", lines)
    assert len({style[1:] for style in chart.legend}) == 14 and line_style(7) == (1, "dashed")
    assert "var(--c5)" in chart.picture and "#00c0f" not in chart.picture
    assert "&lt;13&gt; 13" in chart.picture and "<13>" not in chart.picture


def test_a_point_says_what_was_logged_beside_its_smoothed_value_or_its_interval():
    x, y = np.arange(12.0), np.linspace(0, 1, 12)
    assert "update 11\n1 (2 before smoothing)</title>" in draw("t", "a", [Line("", x, y, raw=y + 1)]).picture
    gains = draw("t", "a", [Line("", x, y, band=(y - 1, y + 1))], words=signed)
    assert "update 11\n+1.00 [0.00, +2.00]</title>" in gains.picture
    assert "smoothing" not in draw("t", "a", [Line("", x[:3], y[:3], raw=y[:3])]).picture, "nothing was smoothed"


def test_numbers_are_written_briefly_and_those_of_a_column_with_as_many_decimals_as_show_two_digits_of_its_spread():
    numbers = (0, 0.4037, -1.5, 1234.5, 999.7, 3e-5, 2.5e7, np.nan)
    assert [in_words(number) for number in numbers] == "0 0.404 −1.5 1234 1000 3e−5 2.5e7 –".split()
    column = ((0.4, 2), (-1.005, 3), (0.004, 2), (np.nan, 2))
    assert [fixed(*cell) for cell in column] == "0.40 −1.005 0.00 –".split()
    assert [signed(value) for value, _ in column] == "+0.40 −1.00 0.00 –".split()
    spreads = (40.0, 0.1, 0.05, 1e-9, 0.0)
    assert [decimals_for([1.0 - spread, 1.0 + spread, np.nan]) for spread in spreads] == [2, 2, 3, 6, 2]


@pytest.mark.parametrize(("num_points", "reach"), [(30, 2), (1000, 50), (5000, 250)])
def test_a_value_is_smoothed_over_a_tenth_of_the_curve(num_points, reach):
    spike = np.zeros(num_points)
    spike[num_points // 2] = 1.0
    assert np.flatnonzero(smooth(spike)).tolist() == list(range(num_points // 2 - reach, num_points // 2 + reach + 1))


def test_smoothing_removes_the_zigzag_of_two_updates_per_round_keeps_a_slope_and_skips_gaps():
    steps = np.arange(100.0)
    smoothed = smooth(0.1 * steps + np.where(steps % 2, 1.0, -1.0))
    np.testing.assert_allclose(smoothed[10:-10], 0.1 * steps[10:-10], atol=0.05)
    np.testing.assert_array_equal(smooth(np.array([1.0, 5.0, np.nan])), [1.0, 5.0, np.nan])  # too few to smooth
    np.testing.assert_allclose(smooth(np.where(steps == 50, np.nan, 2.0)), 2.0)
