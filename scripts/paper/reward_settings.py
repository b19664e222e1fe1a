"""SAGE trained on reward setting A (equal weights) and B (text alignment doubled): which metrics gain.

Example: `python -m scripts.paper.reward_settings --minutes 60`
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hyvideo.observability.metrics import METRIC_MEANINGS
from scripts.paper import results_table
from scripts.paper.drawing import BLUE, ORANGE, name_rows, new_figure, tidy
from scripts.paper.results_table import ROUNDS, SETTINGS, label_of
from scripts.paper.study import Claim, Study, paragraph
from scripts.paper.sweep import Arm, difference, draw_arm, setup_text, verdict
from scripts.paper.tuning import publish_tuned

LABELS = {setting: label_of("sage_grpo", setting) for setting in SETTINGS}


def arms(docs: Path) -> list[Arm]:
    """Those of the results table that train SAGE."""
    return [arm for arm in results_table.arms(docs) if arm.label in LABELS.values()]


def draw(found: Mapping[str, Any]) -> Figure:
    """One panel per metric, one row per setting."""
    figure = new_figure(9, 1.9)
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for axes, (metric, meaning) in zip(panels, METRIC_MEANINGS.items(), strict=True):
        for place, (label, colour) in enumerate(zip(LABELS.values(), (BLUE, ORANGE), strict=True)):
            draw_arm(axes, place, found, label, colour, metric)
        name_rows(axes, [f"setting {setting}" for setting in LABELS])
        tidy(axes, title=f"{metric}: {meaning}", xlabel="gain, held-out")
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say what was compared; the gains are numbers of the results table."""
    return paragraph(
        f"""The picture shows SAGE's gains of the table above by metric, in standard deviations of the base
        model's scores. {setup_text(found)}"""
    )


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """What is weighed more gains more."""
    text = difference(found, LABELS["B"], LABELS["A"], "TA")
    looks = [difference(found, LABELS["A"], LABELS["B"], metric) for metric in ("VQ", "MQ")]
    shown = [str(interval or "no pair yet") for interval in (text, *looks)]
    return [
        Claim("setting B gains more text alignment than setting A", verdict([text]), f"TA, B minus A: {shown[0]}"),
        Claim(
            "setting A gains more visual and motion quality than setting B",
            verdict(looks),
            f"A minus B: VQ {shown[1]}, MQ {shown[2]}",
        ),
    ]


STUDY = Study("reward_settings", "Reward settings A and B", draw, describe, claims)

if __name__ == "__main__":
    sys.exit(publish_tuned(STUDY, arms, sys.argv[1:], __doc__, ROUNDS))
