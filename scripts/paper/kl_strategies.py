"""KL strategies none, fixed, step, moving and dual, at one and at two updates per rollout, over kl_weight (Fig. 8).

Example: `python -m scripts.paper.kl_strategies`

Lambda stays at kl_weight (`kl_schedule fixed`), so that a weight means what it says; all arms sample as many videos.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from scripts.paper.runs import REPOSITORY
from scripts.paper.study import FAILS, HOLDS, Claim, Study, paragraph
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

STRATEGIES: dict[str, dict[str, Any]] = {
    name: yaml.safe_load((REPOSITORY / "configs" / "kl" / f"{name}.yaml").read_text(encoding="utf-8"))["kl"]
    for name in ("none", "fixed", "step", "moving", "dual")
}
ANCHOR_STEPS = 5
ROWS = ((2, 0.01), (2, 0.1), (2, 1.0), (1, 0.1))
"""Updates per rollout and kl_weight of each row. The smallest weight hardly slows training down, and the largest stops
most of it. The paper's is 1e-5."""


def arms() -> list[Arm]:
    """Every strategy of every row; without a KL term the weight makes no difference, so there is one arm of it."""
    found = {}
    for updates, weight in ROWS:
        for strategy, settings in STRATEGIES.items():
            found[label_of(strategy, updates, weight)] = {
                **tuned("sage_grpo"),
                "updates_per_rollout": updates,
                "kl_schedule": "fixed",
                "update_ref_model_step": ANCHOR_STEPS,
                "kl_weight": weight,
                **settings,
            }
    return [Arm(label, settings) for label, settings in found.items()]


def label_of(strategy: str, updates: int, weight: float) -> str:
    """The arm's name."""
    at = "" if strategy == "none" else f", weight {weight:g}"
    return f"{strategy}{at}, {updates} update{'s' if updates > 1 else ''}"


def describe(found: Mapping[str, Any]) -> str:
    """Say what was compared, and what such runs can show."""
    return paragraph(
        f"""Lambda is held at kl_weight, and a moving anchor is refreshed every {ANCHOR_STEPS} updates.
        {setup_text(found)} What a trust region prevents would come later, so these runs show only what it costs."""
    )


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """At each weight dual beats the others, and moving fixed; at one update the velocity term has no value."""
    result, moved = [], {}
    for updates, weight in ROWS[:-1]:
        label = {name: label_of(name, updates, weight) for name in STRATEGIES}
        ahead = {name: difference(found, label["dual"], label[name]) for name in STRATEGIES if name != "dual"}
        result.append(claim_ahead(f"at kl_weight {weight:g}, dual moving KL beats the others", "dual", ahead))
        moved[f"at {weight:g}"] = difference(found, label["moving"], label["fixed"])
    result.append(claim_ahead("a moving anchor beats a fixed one", "moving anchor", moved))
    single = [label_of(strategy, *ROWS[-1]) for strategy in ("step", "dual")]
    runs = [run for label in single if label in found["arms"] for run in found["arms"][label]["runs"].values()]
    if runs:
        largest = max(run["largest_kl_velocity"] for run in runs)
        text = "at one update per rollout the velocity term of the dual KL is zero, so it can only add noise"
        result.append(Claim(text, HOLDS if largest < 1e-6 else FAILS, f"largest of {len(runs)} runs: {largest:.0e}"))
    return result


STUDY = Study("kl_strategies", "KL strategies", describe, claims)

if __name__ == "__main__":
    sys.exit(train_and_publish(STUDY, arms(), parse_budget(sys.argv[1:], __doc__, ROUNDS)))
