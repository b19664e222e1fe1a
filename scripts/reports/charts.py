"""Line charts as SVG geometry: the templates turn a `Drawing` into a picture that follows the page's size and theme.

All coordinates are in a square of 1000 x 1000 that the page stretches, y pointing down; labels are plain text placed
in percent, so that they keep their size on a phone.
"""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import MaxNLocator

NUM_COLOURS = 6
LEAST_SMOOTHED = 10
_SIDE = 1000
_MAX_POINTS = 240
_DASHES = ("", "7 4", "2 4", "9 3 2 3")


def in_words(value: float) -> str:
    """Write a number briefly, as a person would: at most 3 digits, powers of ten where it is tiny or huge."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e5):
        digits, _, power = f"{value:.2e}".partition("e")
        text = f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    else:
        text = f"{value:.3g}" if size < 999.5 else f"{value:.0f}"
    return text.replace("-", "−")


def fixed(value: float, decimals: int = 2) -> str:
    """Write a number with that many decimals, so that those of a column stand under each other."""
    return f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", "−") if math.isfinite(value) else "–"


def signed(value: float) -> str:
    """Write a difference with its sign and two decimals."""
    return f"+{fixed(value)}" if round(value, 2) > 0 else fixed(value)


def decimals_for(values: Collection[float]) -> int:
    """Return the decimals that show two digits of the spread of some values: 2 to 6."""
    finite = np.asarray([value for value in values if math.isfinite(value)])
    spread = float(finite.std()) if len(finite) else 0.0
    return min(max(2, 1 - math.floor(math.log10(spread))), 6) if spread > 0 else 2


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        label: its name in the legend.
        x: [N] increasing.
        y: [N]; NaN leaves a gap.
        colour: number of its colour; beyond the last the colours repeat with another dash.
        raw: [N] values before smoothing, drawn faintly; None for none.
        band: lower and upper edge of a band around y, [N] each; None for none.
        dots: mark every point.
        gaps: stretches of x, first and last of each, at which values are missing: shaded, and not drawn across.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    raw: np.ndarray | None = None
    band: tuple[np.ndarray, np.ndarray] | None = None
    dots: bool = False
    gaps: Sequence[tuple[int, int]] = ()


ROUND = "the round's videos"
"""What most charts are of."""


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Attributes:
        title: the quantity, in words.
        about: one sentence that says how to read it.
        lines: its curves.
        logarithmic: whether y is drawn by its logarithm; values that are not positive are gaps.
        x_label: what x counts.
        words: how its values are written.
        of: which videos its values are of; empty where they are of none.
    """

    title: str
    about: str
    lines: Sequence[Line]
    logarithmic: bool = False
    x_label: str = "update"
    words: Callable[[float], str] = in_words
    of: str = ""


@dataclass(frozen=True)
class Stroke:
    """One SVG path.

    Attributes:
        kind: one of `STROKES`.
        data: the `d` attribute.
        colour: number of its colour.
        dash: the `stroke-dasharray`, empty for a solid line.
        line: number of its curve among those drawn.
    """

    kind: str
    data: str
    colour: int
    dash: str
    line: int


STROKES = ("gap", "band", "raw", "line", "dots")
"""Kinds of strokes, in drawing order."""


@dataclass(frozen=True)
class Drawing:
    """A chart laid out.

    Attributes:
        chart: what is shown.
        strokes: in drawing order.
        x_ticks: places in percent from the left, and their labels.
        y_ticks: places in percent from the top, and their labels.
        legend: (label, colour, dash) of every curve that has a value.
        values: JSON of the curves' points for the hover labels, and for other smoothing.
        ends: JSON of the values at the edges of x and y (of their logarithm where `logarithmic`).
        description: the chart in words.
    """

    chart: Chart
    strokes: tuple[Stroke, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[str, int, str], ...]
    values: str
    ends: str
    description: str


@dataclass(frozen=True)
class _Scale:
    """Maps values to 0..1000, from `low` to `high` (after the logarithm, where there is one)."""

    low: float
    high: float
    logarithmic: bool = False

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Place values; NaN where there is no place."""
        return (self.raw(values) - self.low) / (self.high - self.low) * _SIDE

    def raw(self, values: np.ndarray) -> np.ndarray:
        """Take the logarithm, where there is one."""
        if not self.logarithmic:
            return values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(values > 0, np.log10(values), np.nan)

    def ticks(self, count: int, *, whole: bool = False) -> list[tuple[float, str]]:
        """Choose round values within the scale: (percent from its low end, label)."""
        if self.logarithmic:
            values = self._round_values(count)
            levels, labels = self.raw(values), [in_words(value) for value in values]
        else:
            levels = MaxNLocator(count, steps=[1, 2, 5, 10], integer=whole).tick_values(self.low, self.high)
            values, labels = levels, [in_words(round(level, 12)) for level in levels]
        if len(set(labels)) < len(labels):  # three digits do not tell them apart
            labels = [f"{value:.6g}".replace("-", "−") for value in values]
        inside = [(level, label) for level, label in zip(levels, labels, strict=True) if self.low <= level <= self.high]
        return [(float(level - self.low) / (self.high - self.low) * 100, label) for level, label in inside]

    def _round_values(self, count: int) -> np.ndarray:
        """Choose values of a logarithmic scale: powers of ten, with 2 and 5 between few of them, or evenly spaced."""
        width = self.high - self.low
        if width < 0.6:
            return MaxNLocator(count, steps=[1, 2, 5, 10]).tick_values(10**self.low, 10**self.high)
        powers = np.arange(math.floor(self.low), math.ceil(self.high) + 1, math.ceil(width / count), dtype=float)
        return (10 ** powers[:, None] * np.array([1.0, 2.0, 5.0] if width < 1.6 else [1.0])).flatten()


def draw(chart: Chart) -> Drawing | None:
    """Lay a chart out; None when no curve has a value to show."""
    lines = [line for line in chart.lines if np.isfinite(_y_scale([line], chart.logarithmic).low)]
    if not lines:
        return None
    first, last = (float(pick([pick(line.x) for line in lines])) for pick in (min, max))
    x_scale = _Scale(first, last) if last > first else _Scale(first - 1, last + 1)  # a single point in the middle
    y_scale = _y_scale(lines, chart.logarithmic)
    strokes = []
    for number, line in enumerate(lines):
        colour, dash = line_style(line.colour)
        for kind, data in _strokes(line, x_scale, y_scale).items():
            strokes.append(Stroke(kind, data, colour, dash if kind == "line" else "", number))
    return Drawing(
        chart,
        tuple(sorted(strokes, key=lambda stroke: STROKES.index(stroke.kind))),
        tuple(x_scale.ticks(5, whole=True)),
        tuple((100 - place, label) for place, label in y_scale.ticks(5)),
        tuple((line.label, *line_style(line.colour)) for line in lines),
        json.dumps([_hover(line, chart, x_scale, y_scale) for line in lines], separators=(",", ":")),
        json.dumps({"x": [x_scale.low, x_scale.high], "y": [y_scale.low, y_scale.high]}),
        ". ".join([chart.title, *(_in_words(line, chart) for line in lines)]),
    )


def line_style(number: int) -> tuple[int, str]:
    """Colour and dash of the n-th curve: when the colours are used up they repeat with another dash."""
    return number % NUM_COLOURS, _DASHES[number // NUM_COLOURS % len(_DASHES)]


def _y_scale(lines: Sequence[Line], logarithmic: bool) -> _Scale:
    """Cover all finite values with a small margin; without any, the scale is NaN."""
    parts = [part for line in lines for part in (line.y, line.raw, *(line.band or ())) if part is not None]
    values = _Scale(0, 1, logarithmic).raw(np.concatenate(parts))
    values = values[np.isfinite(values)]
    if not len(values):
        return _Scale(math.nan, math.nan, logarithmic)
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # rounding is not a visible change
        low = high
    margin = 0.06 * (high - low) or 0.5 * abs(low) * (not logarithmic) or 0.5
    flat_zero = low == high == 0 and not logarithmic
    return _Scale(-0.06 if flat_zero else low - margin, 1.0 if flat_zero else high + margin, logarithmic)


def _strokes(line: Line, x_scale: _Scale, y_scale: _Scale) -> dict[str, str]:
    """Make the paths of one curve, by the kind of their stroke."""
    chosen = evenly_spaced(len(line.x), _MAX_POINTS)
    paths = {"line": _curve(line, line.y, chosen, x_scale, y_scale)}
    if line.gaps:
        edges = x_scale(np.array(line.gaps, dtype=float) + [-1, 1])  # from the value before to the value after
        paths["gap"] = "".join(f"M{left:.1f} 0H{right:.1f}V{_SIDE}H{left:.1f}Z" for left, right in edges)
    if line.raw is not None:
        paths["raw"] = _curve(line, line.raw, extremes(line.raw, 2 * _MAX_POINTS), x_scale, y_scale)
    if line.band is not None:
        paths["band"] = _band(line, chosen, x_scale, y_scale)
    x, y = x_scale(line.x[chosen]), y_scale(line.y[chosen])
    there = np.isfinite(x) & np.isfinite(y)
    beside = np.pad(there, 1)
    alone = there if line.dots else there & ~beside[:-2] & ~beside[2:]  # the pen is lifted on both sides of these
    if alone.any():  # lines of no length, whose round ends keep their shape when the picture is stretched
        paths["dots"] = "".join(f"M{px:.1f} {_SIDE - py:.1f}h0" for px, py in zip(x[alone], y[alone], strict=True))
    return paths


def _curve(line: Line, values: np.ndarray, chosen: np.ndarray, x_scale: _Scale, y_scale: _Scale) -> str:
    """Join the chosen values of a line, but not across its gaps."""
    x, gaps = line.x[chosen], [first for first, _ in line.gaps]
    places = np.searchsorted(x, gaps)
    y = np.insert(y_scale(values[chosen]), places, math.nan)
    return _polyline(x_scale(np.insert(x, places, gaps)), y)


def _polyline(x: np.ndarray, y: np.ndarray) -> str:
    """Join points; a NaN lifts the pen."""
    words, drawing = [], False
    for px, py in zip(x, y, strict=True):
        finite = math.isfinite(px) and math.isfinite(py)
        if finite:
            words.append(f"{'L' if drawing else 'M'}{px:.1f} {_SIDE - py:.1f}")
        drawing = finite
    return "".join(words)


def _band(line: Line, chosen: np.ndarray, x_scale: _Scale, y_scale: _Scale) -> str:
    """Outline the band around a curve, once around."""
    low, high = (y_scale(edge)[chosen] for edge in line.band)
    x = x_scale(line.x)[chosen]
    whole = np.isfinite(low) & np.isfinite(high)
    outline = _polyline(np.concatenate([x[whole], x[whole][::-1]]), np.concatenate([high[whole], low[whole][::-1]]))
    return f"{outline}Z" if outline else ""


def _hover(line: Line, chart: Chart, x_scale: _Scale, y_scale: _Scale) -> dict[str, object]:
    """List the points a reader can hover over: x, place in 0..1000, and the value in words.

    Of a smoothed curve it also lists what was logged, in words and as the places of means over stretches, which a page
    smooths otherwise; of one with an interval the words say its ends.
    """
    chosen = evenly_spaced(len(line.x), _MAX_POINTS)
    chosen = chosen[np.isfinite(y_scale(line.y[chosen]))]
    found = {
        "label": line.label,
        "colour": line.colour % NUM_COLOURS,
        "x": [float(value) for value in line.x[chosen]],
        "px": [round(float(place), 1) for place in x_scale(line.x[chosen])],
        "y": [chart.words(float(value)) for value in line.y[chosen]],
    }
    if line.band is not None and line.raw is None:
        low, high = ([chart.words(float(value)) for value in edge[chosen]] for edge in line.band)
        found["y"] = [f"{value} [{low}, {high}]" for value, low, high in zip(found["y"], low, high, strict=True)]
    if line.raw is None or len(line.raw) < LEAST_SMOOTHED:
        return found
    stretches = np.array_split(np.flatnonzero(np.isfinite(y_scale(line.raw))), min(len(line.raw), _MAX_POINTS))
    means = [(line.x[stretch].mean(), line.raw[stretch].mean()) for stretch in stretches if len(stretch)]
    places = zip(x_scale(np.array([x for x, _ in means])), y_scale(np.array([y for _, y in means])), strict=True)
    return found | {
        "logged": [chart.words(float(value)) for value in line.raw[chosen]],
        "means": [[round(float(x), 1), round(float(_SIDE - y), 1)] for x, y in places],
    }


def _in_words(line: Line, chart: Chart) -> str:
    """Say where a curve begins and ends."""
    words, x_label = chart.words, chart.x_label
    finite = np.isfinite(line.y)
    (x, y), name = (line.x[finite], line.y[finite]), f"{line.label}: " if line.label else ""
    start = f"{name}{words(float(y[0]))} at {x_label} {x[0]:g}"
    return start if len(y) == 1 else f"{start}, {words(float(y[-1]))} at {x_label} {x[-1]:g}"


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

    Fewer than LEAST_SMOOTHED values are left as they are.
    """
    if len(values) < LEAST_SMOOTHED:
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
