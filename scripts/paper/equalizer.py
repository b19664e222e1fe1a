"""Held-out reward with and without the temporal gradient equalizer, for all four samplers (paper Eq. 8-9).

Example: `python -m scripts.paper.equalizer --minutes 60`
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyvideo.evaluation.intervals import seed_interval
from scripts.paper.drawing import BLUE, ORANGE, SAMPLERS, legend_below, new_figure, seeds_text, tidy
from scripts.paper.learning_rates import publish_tuned, rate_of
from scripts.paper.study import Claim, Study, paragraph
from scripts.paper.sweep import Arm, difference, gain, setup_text, verdict

ROUNDS = 24
LOOKS = 3
SWITCH = {"with": True, "without": False}


def arms(docs: Path) -> list[Arm]:
    """Every sampler with the equalizer and without, at its tuned rate."""
    return [
        Arm(
            _label(sampler, word),
            {"sde_type": sampler, "use_grad_balancing": on, "learning_rate": rate_of(sampler, docs, word)},
        )
        for sampler in SAMPLERS
        for word, on in SWITCH.items()
    ]


def _label(sampler: str, word: str) -> str:
    return f"{SAMPLERS[sampler]}, {word} equalizer"


def draw(found: Mapping[str, Any]) -> Figure:
    """One panel per sampler: mean over seeds with its interval, and every seed as a faint line."""
    figure = new_figure(10, 3.2)
    panels = figure.subplots(1, 4, sharey=True)
    for axes, (sampler, name) in zip(panels, SAMPLERS.items(), strict=True):
        for word, colour in zip(SWITCH, (BLUE, ORANGE), strict=True):
            if (label := _label(sampler, word)) in found["arms"]:
                _curve(axes, found, label, colour, f"{word} equalizer")
        counts = {
            len(found["arms"][label]["runs"]) for word in SWITCH if (label := _label(sampler, word)) in found["arms"]
        }
        tidy(axes, title=f"{name} ({seeds_text(min(counts, default=0))})", xlabel="optimizer update")
    panels[0].set_ylabel("held-out reward", fontsize=9)
    legend_below(figure, next((p for p in panels if p.lines), panels[0]), columns=2)
    return figure


def _curve(axes: Axes, found: Mapping[str, Any], label: str, colour: str, name: str) -> None:
    """Draw one arm, starting at the base."""
    runs = list(found["arms"][label]["runs"].values())
    updates = [0, *runs[0]["updates"]]
    curves = np.array([[found["base"]["reward"], *run["held_out"]["reward"]] for run in runs])
    axes.plot(updates, curves.T, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(updates, curves.mean(0), "o-", color=colour, linewidth=1.8, markersize=4, label=name)
    if len(runs) > 1:
        intervals = [seed_interval(column) for column in curves.T]
        band = ([i.low for i in intervals], [i.high for i in intervals])
        axes.fill_between(updates, *band, color=colour, alpha=0.15, linewidth=0)


def describe(found: Mapping[str, Any]) -> str:
    """Say what was compared, with the gain of every arm."""
    text = paragraph(
        f"""The lines are the mean held-out reward over the updates, the bands its 95 % interval over seeds, and the
        faint lines single seeds. {setup_text(found)}"""
    )
    rows = [
        f"| {name} | {' | '.join(_cell(found, sampler, word) for word in SWITCH)} |"
        for sampler, name in SAMPLERS.items()
    ]
    header = "| sampler | gain with | gain without |\n|---|---|---|"
    return "\n\n".join([text, "\n".join([header, *rows])])


def _cell(found: Mapping[str, Any], sampler: str, word: str) -> str:
    label = _label(sampler, word)
    return str(gain(found, label)) if label in found["arms"] else "no run yet"


def _change(found: Mapping[str, Any], sampler: str) -> str:
    """With minus without, paired by seed."""
    return str(difference(found, *(_label(sampler, word) for word in SWITCH)) or "no pair yet")


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """The equalizer raises what is learnt, per sampler."""
    return [
        Claim(
            f"the equalizer raises the held-out reward that {name} reaches",
            verdict([difference(found, *(_label(sampler, word) for word in SWITCH))]),
            _change(found, sampler),
        )
        for sampler, name in SAMPLERS.items()
    ]


STUDY = Study("equalizer", "Reward with and without the gradient equalizer", draw, describe, claims)

if __name__ == "__main__":
    sys.exit(publish_tuned(STUDY, arms, sys.argv[1:], __doc__, ROUNDS, LOOKS))
