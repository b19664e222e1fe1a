"""All samplers under reward settings A and B (the paper's Table 2).

Example: `python -m scripts.paper.results_table --minutes 60`

CLIPScore and PickScore, further columns of that table, need networks that are downloaded and know photographs, not
flat shapes: `scripts/evaluate.py` gives them for real videos.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.paper.drawing import SAMPLERS
from scripts.paper.study import Claim, Study, paragraph
from scripts.paper.sweep import (
    ROUNDS,
    Arm,
    claim_ahead,
    difference,
    parse_budget,
    setup_text,
    train_and_publish,
    tuned,
)

SETTINGS = {"A": {"reward_weights": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}}, "B": {}}
"""Setting B is the schema's default, so its runs are those of the equalizer study."""


def arms() -> list[Arm]:
    """Every sampler under both settings, with the equalizer, at its tuned rate and noise."""
    return [
        Arm(label_of(sampler, setting), {"use_grad_balancing": True, **tuned(sampler), **weights})
        for setting, weights in SETTINGS.items()
        for sampler in SAMPLERS
    ]


def label_of(sampler: str, setting: str) -> str:
    """The arm's name."""
    return f"{SAMPLERS[sampler]}, setting {setting}"


def describe(found: Mapping[str, Any]) -> str:
    """Say what was compared."""
    return paragraph(
        f"""Setting A weighs VQ, MQ and TA equally, setting B with 0.5, 0.5 and 1. Overall is their sum in both.
        {setup_text(found)}"""
    )


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """SAGE reaches a higher Overall than each other sampler, and the two settings differ in what they train."""
    result = []
    for setting in SETTINGS:
        sage = label_of("sage_grpo", setting)
        others = {name: label_of(sampler, setting) for sampler, name in SAMPLERS.items() if sampler != "sage_grpo"}
        ahead = {name: difference(found, sage, other, "Overall") for name, other in others.items()}
        text = f"under reward setting {setting}, SAGE reaches a higher Overall than {', '.join(ahead)}"
        result.append(claim_ahead(text, "SAGE", ahead))
    return result


STUDY = Study("results_table", "Samplers under reward settings A and B", describe, claims)

if __name__ == "__main__":
    sys.exit(train_and_publish(STUDY, arms(), parse_budget(sys.argv[1:], __doc__, ROUNDS)))
