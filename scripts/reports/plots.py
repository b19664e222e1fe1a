"""The picture of a run: its reward over the updates, in total and per component."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hyvideo.data.files import replacing
from hyvideo.evaluation.paired import Gain
from hyvideo.observability.metrics import METRIC_MEANINGS, read_metrics
from scripts.reports.charts import smooth
from scripts.reports.run_record import column_of

_BLUE, _BLACK = "C0", "0.15"


def plot_reward_curve(metrics: Path, png: Path, *, held_out: Mapping[str, Gain]) -> None:
    """Draw the reward over the base model's where that was logged twice, else `reward/mean`, and beside it VQ, MQ, TA.

    Faint lines are the values as logged, strong lines smoothed over a tenth of the run, as in the report. The band of
    `reward/mean` is one `reward/std`. `held_out` gains from before the first update to after the last are drawn over
    the curves of their names.

    Raises:
        ValueError: the file is missing or holds no reward.
    """
    rows = read_metrics(metrics)
    steps, mean = column_of(rows, "step"), column_of(rows, "reward/mean")
    if not np.isfinite(mean).any():
        raise ValueError(f"{metrics} holds no 'reward/mean' in its {len(rows)} rows: nothing to draw.")
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    panels = figure.subplot_mosaic([["reward", name] for name in METRIC_MEANINGS], width_ratios=(2.2, 1))
    over = column_of(rows, "reward/over_base")
    compared = np.isfinite(over) & (np.diff(column_of(rows, "round"), prepend=-1) != 0)
    if compared.sum() > 1:
        label = "training videos, less the base model's of the same prompts and noise"
        panels["reward"].plot(steps[compared], over[compared], "o-", color=_BLUE, markersize=4, label=label)
        panels["reward"].axhline(0, color="0.6", linewidth=0.8)
        title = "Reward over the base model's"
        if gain := held_out.get("reward"):
            held_out = {**held_out, "reward": replace(gain, before=0.0, after=gain.mean)}
    else:
        centre, width = smooth(mean), smooth(column_of(rows, "reward/std"))
        panels["reward"].fill_between(steps, centre - width, centre + width, color=_BLUE, alpha=0.12, linewidth=0)
        _draw_curve(panels["reward"], steps, mean)
        title = "Reward during training"
    for name in METRIC_MEANINGS:
        _draw_curve(panels[name], steps, column_of(rows, f"reward/{name}"))
    for name in panels.keys() & held_out:
        _draw_gain(panels[name], steps[-1], held_out[name])
    _label(panels, title)
    with replacing(Path(png)) as temporary:
        figure.savefig(temporary, dpi=150)


def _draw_curve(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    axes.plot(steps, values, color=_BLUE, alpha=0.3, linewidth=0.8)
    axes.plot(steps, smooth(values), color=_BLUE, linewidth=2, label="training videos (mean, band: one std)")


def _draw_gain(axes: Axes, last: float, gain: Gain) -> None:
    """Draw both means, and at the second one the interval of their paired difference."""
    label = f"{gain.num_pairs} held-out videos before and after (bar: 95 % interval of the gain)"
    axes.plot([0, last], [gain.before, gain.after], "D--", color=_BLACK, linewidth=1, markersize=4, label=label)
    axes.plot([last] * 2, [gain.before + gain.low, gain.before + gain.high], color=_BLACK, linewidth=2.5)


def _label(panels: Mapping[str, Axes], title: str) -> None:
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels["reward"].set(title=title, ylabel="reward", xlabel="optimizer update")
    panels["reward"].margins(y=0.12)  # room for the legend
    panels["reward"].legend(frameon=False, fontsize=8, loc="upper left")
    for name, meaning in METRIC_MEANINGS.items():
        panels[name].set_title(f"{name}: {meaning}", fontsize=10, loc="left")
    last = list(METRIC_MEANINGS)[-1]
    for name in METRIC_MEANINGS:
        panels[name].tick_params(labelbottom=name == last)
    panels[last].set_xlabel("optimizer update")
