"""The picture of a run: its reward over the updates, in total and per component."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hyvideo.data.files import replacing
from hyvideo.observability.curves import smooth
from hyvideo.observability.metrics import METRIC_MEANINGS, read_metrics


def plot_reward_curve(metrics: Path | Mapping[str, Path], png: Path, *, title: str = "Reward during training") -> None:
    """Draw `reward/mean` with a band of one `reward/std`, and beside it VQ, MQ and TA.

    Faint lines are the values as logged, strong lines smoothed over a tenth of the run, as in the report.

    Args:
        metrics: the `metrics.jsonl` of one run, or of several by their name in the legend.
        png: the picture to write.
        title: heading of the large panel.

    Raises:
        ValueError: a file is missing or holds no reward.
    """
    runs = dict(metrics) if isinstance(metrics, Mapping) else {"": metrics}
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["reward", name] for name in METRIC_MEANINGS], width_ratios=(2.2, 1))
    for number, (label, path) in enumerate(runs.items()):
        rows, colour = read_metrics(path), f"C{number}"
        steps = _column(rows, "step")
        if not np.isfinite(_column(rows, "reward/mean")).any():
            raise ValueError(f"{path} holds no 'reward/mean' in its {len(rows)} rows: nothing to draw.")
        _draw_band(panels["reward"], steps, _column(rows, "reward/mean"), _column(rows, "reward/std"), colour)
        _draw_curve(panels["reward"], steps, _column(rows, "reward/mean"), colour, label)
        for name in METRIC_MEANINGS:
            _draw_curve(panels[name], steps, _column(rows, f"reward/{name}"), colour, label)
    _label(panels, title, with_legend=len(runs) > 1)
    with replacing(Path(png)) as temporary:
        figure.savefig(temporary, dpi=150)


def _column(rows: list[dict[str, float]], name: str) -> np.ndarray:
    return np.array([row.get(name, np.nan) for row in rows], dtype=np.float64)


def _draw_band(axes: Axes, steps: np.ndarray, mean: np.ndarray, spread: np.ndarray, colour: str) -> None:
    centre, width = smooth(mean), smooth(spread)
    axes.fill_between(steps, centre - width, centre + width, color=colour, alpha=0.12, linewidth=0)


def _draw_curve(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(steps, smooth(values), color=colour, linewidth=2, label=label)


def _label(panels: Mapping[str, Axes], title: str, *, with_legend: bool) -> None:
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels["reward"].set(title=title, ylabel="reward (mean, band: one std)", xlabel="optimizer update")
    for name, meaning in METRIC_MEANINGS.items():
        panels[name].set_title(f"{name}: {meaning}", fontsize=10, loc="left")
    last = list(METRIC_MEANINGS)[-1]
    for name in METRIC_MEANINGS:
        panels[name].tick_params(labelbottom=name == last)
    panels[last].set_xlabel("optimizer update")
    if with_legend:
        panels["reward"].legend(frameon=False)
