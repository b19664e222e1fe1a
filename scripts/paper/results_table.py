"""All samplers under reward settings A and B, in the form of the paper's Table 2.

Example: `python -m scripts.paper.results_table --minutes 60`

CLIPScore and PickScore, the other columns of that table, need networks that are downloaded and know photographs, not
flat shapes: `scripts/evaluate.py` gives them for real videos.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from scripts.paper.drawing import COLOURS, SAMPLERS, name_rows, new_figure, tidy
from scripts.paper.equalizer import ROUNDS
from scripts.paper.study import Claim, Study, paragraph
from scripts.paper.sweep import Arm, claim_ahead, difference, draw_arm, gain, setup_text
from scripts.paper.tuning import publish_tuned, tuned_settings
from scripts.reports.markdown import markdown_table

SETTINGS = {"A": {"reward_weights": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}}, "B": {}}
"""Setting B is the schema's default, so its runs are those of the equalizer study."""

COLUMNS = ("Overall", "VQ", "MQ", "TA")


def arms(docs: Path) -> list[Arm]:
    """Every sampler under both settings, with the equalizer, at its tuned rate and noise."""
    return [
        Arm(label_of(sampler, setting), {"use_grad_balancing": True, **tuned_settings(sampler, docs), **weights})
        for setting, weights in SETTINGS.items()
        for sampler in SAMPLERS
    ]


def label_of(sampler: str, setting: str) -> str:
    """The arm's name."""
    return f"{SAMPLERS[sampler]}, setting {setting}"


def draw(found: Mapping[str, Any]) -> Figure:
    """One panel per setting, one row per sampler: gain in Overall."""
    figure = new_figure(8, 2.6)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, setting in zip(panels, SETTINGS, strict=True):
        for place, sampler in enumerate(SAMPLERS):
            draw_arm(axes, place, found, label_of(sampler, setting), COLOURS[sampler], "Overall")
        name_rows(axes, list(SAMPLERS.values()))
        tidy(axes, title=f"reward setting {setting}", xlabel="gain in Overall (VQ + MQ + TA), held-out")
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say what was compared; a table with the base and every arm."""
    base = found["base"]
    rows = [["base", "", *(f"{base[metric]:+.2f}" for metric in COLUMNS)]]
    rows += [
        [SAMPLERS[sampler], setting, *_cells(found, label_of(sampler, setting))]
        for setting in SETTINGS
        for sampler in SAMPLERS
    ]
    text = paragraph(
        f"""The first row gives the means of the base model, the others gains over it. Setting A trains with equal
        weights, setting B with 0.5, 0.5 and 1. Overall is VQ + MQ + TA in both. {setup_text(found)}"""
    )
    return f"{text}\n\n{markdown_table(['model', 'setting', *COLUMNS], rows)}"


def _cells(found: Mapping[str, Any], label: str) -> list[str]:
    """Gain in each column."""
    if label not in found["arms"]:
        return ["no run yet"] + [""] * (len(COLUMNS) - 1)
    return [str(gain(found, label, column)) for column in COLUMNS]


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """SAGE reaches a higher Overall than each other sampler, per setting."""
    result = []
    for setting in SETTINGS:
        sage = label_of("sage_grpo", setting)
        ahead = {
            SAMPLERS[sampler]: difference(found, sage, label_of(sampler, setting), "Overall")
            for sampler in SAMPLERS
            if sampler != "sage_grpo"
        }
        text = f"under reward setting {setting}, SAGE reaches a higher Overall than {', '.join(ahead)}"
        result.append(claim_ahead(text, "SAGE", ahead))
    return result


STUDY = Study("results_table", "Samplers under reward settings A and B", draw, describe, claims)

if __name__ == "__main__":
    sys.exit(publish_tuned(STUDY, arms, sys.argv[1:], __doc__, ROUNDS))
