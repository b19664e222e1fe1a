"""The grid of learning rates of the algorithms that are compared: equal for all, on other seeds and training prompts.

Example: `python -m scripts.paper.algorithm_rates`
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from scripts.paper.algorithms import COLOURS, RATES, grid
from scripts.paper.drawing import legend_below, new_figure, tidy
from scripts.paper.study import Claim, Study, paragraph
from scripts.paper.sweep import gains, parse_budget, setup_text, train_and_publish

ROUNDS = 6
SEEDS = (101, 102)


def draw(found: Mapping[str, Any]) -> Figure:
    """Mean gain over the rate, one line per algorithm."""
    figure = new_figure(5, 3.4)
    axes = figure.subplots()
    for name, colour in COLOURS.items():
        means = [(rate, list(gains(found, f"{name} {rate:.0e}").values())) for rate in RATES]
        if known := [(rate, np.mean(values)) for rate, values in means if values]:
            axes.plot(*zip(*known, strict=True), color=colour, marker="o", markersize=4, label=name)
    axes.set_xscale("log")
    axes.set_xticks(RATES, labels=[f"{rate:.0e}" for rate in RATES])
    tidy(axes, xlabel="learning rate", ylabel="gain in reward, training prompts")
    legend_below(figure, axes, columns=4)
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say how the rates are chosen."""
    rates = ", ".join(f"{rate:.0e}" for rate in RATES)
    return paragraph(f"Every algorithm is trained at {rates}; the best goes into the comparison. {setup_text(found)}")


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """No claims: this is how the comparison is tuned."""
    return []


STUDY = Study("algorithm_rates", "Learning rates of the algorithms, tuned equally", draw, describe, claims)

if __name__ == "__main__":
    budget = parse_budget(sys.argv[1:], __doc__, ROUNDS, seeds=SEEDS)
    sys.exit(train_and_publish(STUDY, grid(), budget, tuned=True))
