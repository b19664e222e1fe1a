"""The curves of a report, of one run or of several overlaid: which are drawn, and how."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from hyvideo.observability.metrics import METRIC_MEANINGS
from hyvideo.observability.phase_timer import PHASES
from scripts.reports.improvement import gains_over_training
from scripts.reports.run_record import RunRecord
from scripts.reports.words import in_words, signed

_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # one run, one page
    "path.simplify_threshold": 1.0,  # in pixels: thousands of updates become few points
    "font.size": 12,
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), "#00c0fa"),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), "#00c0fb"),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size", "xtick.major.width", "ytick.left"), 0),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    "axes.xmargin": 0.01,
}
_VARIABLES = {**{str(number): f"c{number}" for number in range(6)}, "a": "muted", "b": "line"}
"""The colour #00c0fX of a figure becomes a variable of the page's style sheet, which follows the reader's theme."""
_DASHES = ("solid", "dashed", "dotted")
_MAX_VALUES, _MAX_OF_BAND, _LEAST_SMOOTHED = 48, 240, 10


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        x, y: [N] each, x increasing; a NaN in y leaves a gap.
        number: decides its colour, and beyond the last colour its dash.
        raw: [N] values before smoothing, drawn faintly; None for none.
        band: lower and upper edge of a band around y, [N] each; None for none.
        gaps: stretches of x, first and last of each, at which values are missing: shaded, and not drawn across.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    number: int = 0
    raw: np.ndarray | None = None
    band: tuple[np.ndarray, np.ndarray] | None = None
    dots: bool = False
    gaps: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Chart:
    """A chart as a page shows it: title, how to read it, SVG, (label, colour, dash) of its curves, and all in words."""

    title: str
    about: str
    picture: Markup
    legend: tuple[tuple[str, int, str], ...]
    description: str


def line_style(number: int) -> tuple[int, str]:
    """Colour and dash of the n-th curve: when the colours are used up they repeat with another dash."""
    return number % 6, _DASHES[number // 6 % len(_DASHES)]


def draw(
    title: str,
    about: str,
    lines: Sequence[Line],
    *,
    logarithmic: bool = False,
    words: Callable[[float], str] = in_words,
) -> Chart | None:
    """Draw a chart whose values are written by `words`; None when no curve has a value to show."""
    lines = [line for line in lines if (line.y > 0 if logarithmic else np.isfinite(line.y)).any()]
    if not lines:
        return None
    with matplotlib.rc_context(_STYLE):
        axes = _frame(logarithmic)
        for former in (*axes.lines, *axes.collections, *axes.patches):
            former.remove()
        axes.relim()
        axes.autoscale()
        for line in lines:
            _draw_line(axes, line)
        low, high = axes.dataLim.minposy if logarithmic else axes.dataLim.y0, axes.dataLim.y1
        if high - low <= 1e-6 * abs(high):  # rounding is not a visible change
            around = abs(high) / 2 or 1.0
            axes.set_ylim(high - around, high + around)
        few = LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,), numticks=5)
        axes.yaxis.set_major_locator(few if logarithmic else MaxNLocator(5, steps=[1, 2, 5, 10]))
        file = io.StringIO()
        axes.figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    svg = re.sub("#00c0f([0-9a-b])", lambda found: f"var(--{_VARIABLES[found[1]]})", svg[svg.index("<svg") :])
    svg = re.sub(r'<g id="(line|gap)">', r'<g class="\1">', svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub("<[^>]*>", lambda tag: re.sub(r"(\d\.\d)\d\d+", r"\1", tag[0]), svg)  # to a tenth of a pixel
    svg = svg.replace("</svg>", f"{_values(axes, lines, words)}</svg>")
    legend = tuple((line.label, *line_style(line.number)) for line in lines)
    return Chart(title, about, Markup(svg), legend, ". ".join([title, *(_ends(line, words) for line in lines)]))


@cache
def _frame(logarithmic: bool) -> Axes:
    """Make what is around the curves, once: it takes as long as all else of a chart."""
    axes = Figure(figsize=(5, 3), dpi=72).add_axes((0.14, 0.19, 0.84, 0.78))
    if logarithmic:
        axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: in_words(round(value, 12), 6)))
    axes.grid(axis="y")
    axes.set_xlabel("update", loc="right")
    return axes


def _draw_line(axes: Axes, line: Line) -> None:
    colour, dash = line_style(line.number)
    style = {"color": f"#00c0f{colour}"}
    places = np.searchsorted(line.x, [first for first, _ in line.gaps])
    x = np.insert(line.x, places, [first for first, _ in line.gaps])
    y, raw = (None if values is None else np.insert(values, places, np.nan) for values in (line.y, line.raw))
    for first, last in line.gaps:
        axes.axvspan(first - 1, last + 1, alpha=0.14, linewidth=0, gid="gap", **style)
    if line.band is not None:
        shown = evenly_spaced(len(line.x), _MAX_OF_BAND)
        axes.fill_between(line.x[shown], *(edge[shown] for edge in line.band), alpha=0.14, linewidth=0, **style)
    if raw is not None:
        axes.plot(x, raw, linewidth=1, alpha=0.38, **style)
    there = np.pad(np.isfinite(y), 1)
    marked = there[1:-1] if line.dots else there[1:-1] & ~there[:-2] & ~there[2:]  # no line reaches these
    marks = {"marker": "o", "markersize": 5, "markevery": np.flatnonzero(marked).tolist()} if marked.any() else {}
    axes.plot(x, y, linewidth=2, linestyle=dash, gid="line", **marks, **style)


def _values(axes: Axes, lines: Sequence[Line], words: Callable[[float], str]) -> str:
    """Cover the plot with strips that tell the values there to whoever points at them."""
    every = np.unique(np.concatenate([line.x[np.isfinite(line.y)] for line in lines]))
    shown = every[evenly_spaced(len(every), _MAX_VALUES)]
    box = axes.get_window_extent()
    places = axes.transData.transform(np.column_stack([shown, np.ones(len(shown))]))[:, 0]
    edges = [box.x0, *((places[1:] + places[:-1]) / 2), box.x1]
    strips = []
    for x, left, right in zip(shown, edges, edges[1:], strict=False):
        told = [_value(line, at, words) for line in lines for at in np.flatnonzero(line.x == x)[:1]]
        place = f'x="{left:.1f}" y="{axes.figure.bbox.height - box.y1:.1f}" width="{right - left:.1f}"'
        title = escape("\n".join([f"update {x:g}", *told]))
        strips.append(f'<rect {place} height="{box.height:.1f}"><title>{title}</title></rect>')
    return "".join(strips)


def _value(line: Line, at: int, words: Callable[[float], str]) -> str:
    text = f"{line.label} {words(float(line.y[at]))}".lstrip()
    if line.raw is not None:
        return f"{text} ({words(line.raw[at])} before smoothing)" if len(line.raw) >= _LEAST_SMOOTHED else text
    return text if line.band is None else f"{text} [{', '.join(words(edge[at]) for edge in line.band)}]"


def _ends(line: Line, words: Callable[[float], str]) -> str:
    """Say where a curve begins and ends."""
    finite = np.isfinite(line.y)
    (x, y), name = (line.x[finite], line.y[finite]), f"{line.label}: " if line.label else ""
    start = f"{name}{words(y[0])} at update {x[0]:g}"
    return start if len(y) == 1 else f"{start}, {words(y[-1])} at update {x[-1]:g}"


def smooth(values: np.ndarray) -> np.ndarray:
    """Smooth [N] values over a tenth of them: a centred mean taken twice, so that no zigzag of a round is left.

    NaNs are left out, and fewer than 10 values are left as they are.
    """
    if len(values) < _LEAST_SMOOTHED:
        return values
    half = (max(3, len(values) // 10) // 2 + 1) // 2
    for _ in range(2):
        finite = np.isfinite(values)
        padded = (np.pad(part, half) for part in (finite.astype(float), np.where(finite, values, 0.0)))
        counts, sums = (np.convolve(part, np.ones(2 * half + 1), "valid") for part in padded)
        values = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return values


def evenly_spaced(num_points: int, limit: int) -> np.ndarray:
    """At most `limit` indices spread over `num_points`, the first and the last among them."""
    return np.unique(np.linspace(0, max(num_points - 1, 0), min(num_points, limit)).round().astype(int))


@dataclass(frozen=True)
class _Logged:
    """A metric and how it is drawn: one point `per` update, round or validation."""

    name: str
    title: str
    about: str
    per: str = "update"
    logarithmic: bool = False
    smoothed: bool = True
    words: Callable[[float], str] = in_words


_REWARD = (
    _Logged(
        "reward/mean",
        "Training reward",
        "Of each round's videos, whose prompts differ, so it moves more than the validated gain. Faint: as logged. The "
        "band of a single run is one standard deviation.",
        "round",
    ),
    _Logged(
        *("reward/over_base", "Training reward over the base", "Mean gain over the base's videos of the same prompts."),
        *("round", False, False, signed),
    ),
    _Logged("reward", "Validation reward", "The same prompts and seeds each time, without noise.", "validation"),
    _Logged("judge", "Validation by the judge", "By the judge of reward_guard, which is not trained on.", "validation"),
    _Logged("reward/std", "Spread of the reward", "Near 0 there is nothing left to compare in a round.", "round"),
)
_MIXING = (
    _Logged("share", "Share of each metric in the advantage", "They add up to 1; near 0 one decides nothing.", "round"),
    _Logged("spread", "Spread of each metric within a prompt", "Standard deviation, in the metric's unit.", "round"),
    _Logged("correlation", "Correlation of each metric with the others", "Below 0 it contradicts them.", "round"),
)
"""How the metrics share in what a run learns (`mixing/*`): one that decides nothing, or everything, is seen here."""
_TRUST = (
    _Logged("kl/position", "KL to the anchor", "How far the steps' means moved from the anchor's.", "update", True),
    _Logged("kl/velocity", "KL within a round", "Old minus new log-probability. 0 at a round's first update."),
    _Logged("nft/old_distance", "Distance to the old policy", "Mean squared difference of velocities.", "update", True),
    _Logged("nft/base_distance", "Distance to the base", "Mean squared difference of velocities.", "update", True),
    _Logged("kl/coef", "KL coefficient", "Weight of the KL term in the loss.", smoothed=False),
    _Logged("kl/gradient_share", "KL term's share", "Its gradient, divided by the policy loss's.", "update", True),
    _Logged("clip_fraction", "Clipped share", "Pairs of video and step whose gradient the clip removed."),
    _Logged("ratio/max_deviation", "Ratio before the first update", "Largest |ratio - 1| of the replay. Should be 0."),
    _Logged("replay/mean_error", "Replay error", "Largest deviation of a replayed mean, in units of the noise."),
    _Logged("grad_norm", "Gradient norm", "Over all trained weights, before clipping.", "update", True),
    _Logged("loss/policy", "Policy loss", "Its level says little, its jumps much."),
    _Logged("lr", "Learning rate", "As used by each update.", smoothed=False),
)
_TIME = (
    _Logged(
        "seconds", "Seconds per update", "All phases together; an update that begins a round pays for its rollout."
    ),
    _Logged(
        "perf/slowest_ratio", "Slowest rank's own work", "Divided by the median rank's. Should be near 1.", "round"
    ),
    _Logged("perf/slowest_rank", "Slowest rank", "One that stays slowest is slow.", "round", False, False),
)

_OURS = {
    *("advantage", "clip_fraction", "drift", "grad_norm", "kl", "loss/policy", "loss/total", "lr", "mixing", "nft"),
    *("perf", "ratio", "replay", "reward", "rollout", "round", "run", "seconds", "step", "time", "update", "valid"),
    "velocity_grad",
}
"""Names, or what stands before their slash, of the metrics that the framework logs; others are an algorithm's own."""


def charts_of(runs: Sequence[RunRecord]) -> dict[str, list[Chart]]:
    """Draw what the runs logged, by the section of the report that shows it."""
    alone = runs[0] if len(runs) == 1 else None
    reward = [_chart(logged, runs, alone if logged.name == "reward/mean" else None) for logged in _REWARD]
    for name in dict.fromkeys(name for run in runs for name in run.metric_names):
        title = ": ".join(filter(None, [name, METRIC_MEANINGS.get(name)]))
        reward.append(_chart(_Logged(f"reward/{name}", title, "Mean over each round's videos.", "round"), runs))
    for logged in _MIXING if alone else ():
        lines = [
            line
            for number, name in enumerate(alone.metric_names)
            for line in _lines(logged, alone, f"mixing/{logged.name}_{name}", name, number)
        ]
        reward.append(draw(logged.title, logged.about, lines))
    trust = [_chart(logged, runs) for logged in _TRUST]
    logged = dict.fromkeys(name for run in runs for name in run.columns)
    own = [name for name in logged if not {name, name.partition("/")[0]} & _OURS]
    sections = {
        "Reward": reward,
        "Trust region": trust,
        "Time": [_chart(logged, runs) for logged in _TIME],
        "Own": [_chart(_Logged(name, name, "Logged by the algorithm."), runs) for name in own],
    }
    return {name: [chart for chart in charts if chart] for name, charts in sections.items()}


def _chart(logged: _Logged, runs: Sequence[RunRecord], banded: RunRecord | None = None) -> Chart | None:
    """Draw a metric of all runs; that of `banded` with one standard deviation of the reward around it."""
    lines = []
    for number, run in enumerate(runs):
        lines += _lines(logged, run, logged.name, run.name if len(runs) > 1 else "", number)
        if lines and run is banded:
            width = smooth(run.per_round("reward/std")[1])
            lines[-1] = replace(lines[-1], band=(lines[-1].y - width, lines[-1].y + width))
    return draw(logged.title, logged.about, lines, logarithmic=logged.logarithmic, words=logged.words)


def _lines(logged: _Logged, run: RunRecord, name: str, label: str, number: int) -> list[Line]:
    """Return the curve of a run, none where it logged nothing of that name."""
    per = {"round": run.per_round, "validation": run.validation}
    x, y = per[logged.per](name) if logged.per in per else (run.column("step"), run.column(name))
    there = np.isfinite(y)
    if not there.any():
        return []
    if logged.per == "validation" or not (logged.smoothed or logged.per == "update"):
        return [Line(label, x[there], y[there], number, dots=True)]
    raw = y if logged.smoothed else None
    return [Line(label, x, smooth(y) if logged.smoothed else y, number, raw=raw, gaps=run.gaps)]


def gain_chart(runs: Sequence[RunRecord]) -> Chart | None:
    """Draw by how much each validation's reward exceeds the first one's, with intervals for a run alone."""
    lines = []
    for number, run in enumerate(runs):
        gains = {step: gain.relative for step, gain in gains_over_training(run).items()}
        alone, steps = len(runs) == 1, np.array(list(gains), dtype=float)
        mean, *band = (np.array([getattr(gain, edge) for gain in gains.values()]) for edge in ("mean", "low", "high"))
        band = tuple(band) if alone else None
        lines.append(Line("" if alone else run.name, steps, mean, number, band=band, dots=True))
    about = "Validation videos against those of the same prompts and noise at the first validation, in base std."
    return draw("Validated gain", f"{about} The band of a single run is its 95 % interval.", lines, words=signed)


def time_split(run: RunRecord) -> dict[str, float]:
    """Mean seconds per update by phase, over the whole run; empty when no time was logged."""
    means = {phase: run.column(f"time/{phase}") for phase in PHASES}
    return {phase: float(np.nanmean(values)) for phase, values in means.items() if np.isfinite(values).any()}
