"""Held-out reward with and without the temporal gradient equalizer, for all four samplers (paper Eq. 8-9).

Example: `python -m scripts.paper.equalizer --minutes 60`
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.paper.drawing import SAMPLERS
from scripts.paper.study import Claim, Study, paragraph
from scripts.paper.sweep import (
    ROUNDS,
    Arm,
    difference,
    parse_budget,
    setup_text,
    shown_gain,
    train_and_publish,
    tuned,
    verdict,
)
from scripts.reports.markdown import markdown_table

SWITCH = {"with": True, "without": False}


def arms() -> list[Arm]:
    """Every sampler with the equalizer and without, at its tuned rate and noise."""
    return [
        Arm(_label(sampler, word), {"use_grad_balancing": on, **tuned(sampler, equalizer=on)})
        for sampler in SAMPLERS
        for word, on in SWITCH.items()
    ]


def _label(sampler: str, word: str) -> str:
    return f"{SAMPLERS[sampler]}, {word} equalizer"


def describe(found: Mapping[str, Any]) -> str:
    """Say what was compared, with the gain of every arm."""
    text = paragraph(f"Each arm trains at its own tuned rate and noise. {setup_text(found)}")
    rows = [
        [name, *(shown_gain(found, _label(sampler, word)) for word in SWITCH)] for sampler, name in SAMPLERS.items()
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


STUDY = Study("equalizer", "Reward with and without the gradient equalizer", describe, claims)

if __name__ == "__main__":
    sys.exit(train_and_publish(STUDY, arms(), parse_budget(sys.argv[1:], __doc__, ROUNDS)))
