"""Held-out reward with and without the temporal gradient equalizer, for all four samplers (paper Eq. 8-9).

Example: `python -m scripts.paper.equalizer --minutes 60`
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from scripts.paper.drawing import BLUE, ORANGE, SAMPLERS, name_rows, new_figure, tidy
from scripts.paper.study import Claim, Study, paragraph
from scripts.paper.sweep import Arm, difference, draw_arm, gain, setup_text, verdict
from scripts.paper.tuning import publish_tuned, tuned_settings
from scripts.reports.markdown import markdown_table

ROUNDS = 8
SWITCH = {"with": True, "without": False}


def arms(docs: Path) -> list[Arm]:
    """Every sampler with the equalizer and without, at its tuned rate and noise."""
    return [
        Arm(_label(sampler, word), {"use_grad_balancing": on, **tuned_settings(sampler, docs, word)})
        for sampler in SAMPLERS
        for word, on in SWITCH.items()
    ]


def _label(sampler: str, word: str) -> str:
    return f"{SAMPLERS[sampler]}, {word} equalizer"


def draw(found: Mapping[str, Any]) -> Figure:
    """One panel per sampler, one row with the equalizer and one without."""
    figure = new_figure(10, 2)
    panels = figure.subplots(1, len(SAMPLERS), sharex=True, sharey=True)
    for axes, (sampler, name) in zip(panels, SAMPLERS.items(), strict=True):
        for place, (word, colour) in enumerate(zip(SWITCH, (BLUE, ORANGE), strict=True)):
            draw_arm(axes, place, found, _label(sampler, word), colour)
        name_rows(axes, [f"{word} equalizer" for word in SWITCH])
        tidy(axes, title=name, xlabel="gain in held-out reward")
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say what was compared, with the gain of every arm."""
    text = paragraph(f"Each row trains at its own tuned rate and noise. {setup_text(found)}")
    labels = {name: [_label(sampler, word) for word in SWITCH] for sampler, name in SAMPLERS.items()}
    rows = [
        [name, *(str(gain(found, label)) if label in found["arms"] else "no run yet" for label in of_sampler)]
        for name, of_sampler in labels.items()
    ]
    return f"{text}\n\n{markdown_table(['sampler', 'gain with', 'gain without'], rows)}"


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """The equalizer raises what is learnt, per sampler."""
    changes = {name: difference(found, *(_label(sampler, w) for w in SWITCH)) for sampler, name in SAMPLERS.items()}
    return [
        Claim(
            f"the equalizer raises the held-out reward that {name} reaches",
            verdict([change]),
            str(change or "no pair yet"),
        )
        for name, change in changes.items()
    ]


STUDY = Study("equalizer", "Reward with and without the gradient equalizer", draw, describe, claims)

if __name__ == "__main__":
    sys.exit(publish_tuned(STUDY, arms, sys.argv[1:], __doc__, ROUNDS))
