"""KL strategies none, fixed, step, moving and dual, at one and at two updates per rollout, over kl_weight (Fig. 8).

Example: `python -m scripts.paper.kl_strategies`

Lambda stays at kl_weight (`kl_schedule fixed`), so that a weight means what it says; all arms sample as many videos.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.paper.drawing import BLACK, BLUE, GREEN, ORANGE, PINK, name_rows, new_figure, tidy
from scripts.paper.runs import REPOSITORY
from scripts.paper.study import FAILS, HOLDS, Claim, Study, paragraph
from scripts.paper.sweep import Arm, claim_ahead, difference, draw_arm, gain, setup_text
from scripts.paper.tuning import publish_tuned, tuned_settings

ROUNDS = 8
WEIGHTS = (0.01, 0.1, 1.0)
"""The smallest hardly slows training down, and the largest stops most of it. The paper's is 1e-5."""

STRATEGIES: dict[str, dict[str, Any]] = {
    name: yaml.safe_load((REPOSITORY / "configs" / "kl" / f"{name}.yaml").read_text(encoding="utf-8"))["kl"]
    for name in ("none", "fixed", "step", "moving", "dual")
}
COLOURS = dict(zip(STRATEGIES, (BLACK, ORANGE, GREEN, PINK, BLUE), strict=True))
ANCHOR_STEPS = 5
PANELS = (*((2, weight) for weight in WEIGHTS), (1, 0.1))
"""Updates per rollout and kl_weight of each panel."""


def arms(docs: Path) -> list[Arm]:
    """Every strategy of every panel; without a KL term the weight makes no difference, so there is one arm of it."""
    tuned = tuned_settings("sage_grpo", docs)
    found = {}
    for updates, weight in PANELS:
        for strategy, settings in STRATEGIES.items():
            found[label_of(strategy, updates, weight)] = {
                **tuned,
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


def draw(found: Mapping[str, Any]) -> Figure:
    """One panel per weight and number of updates, one row per strategy."""
    figure = new_figure(8, 5)
    panels = figure.subplots(2, len(PANELS) // 2, sharex=True, sharey=True)
    for axes, (updates, weight) in zip(panels.flat, PANELS, strict=True):
        _panel(axes, found, updates, weight)
    return figure


def _panel(axes: Axes, found: Mapping[str, Any], updates: int, weight: float) -> None:
    """Draw the strategies of one weight."""
    for place, (strategy, colour) in enumerate(COLOURS.items()):
        draw_arm(axes, place, found, label_of(strategy, updates, weight), colour)
    name_rows(axes, list(STRATEGIES))
    title = f"{updates} update{'s' if updates > 1 else ''} per rollout\nkl_weight {weight:g}"
    tidy(axes, title=title, xlabel="gain in held-out reward")


def describe(found: Mapping[str, Any]) -> str:
    """Say what was compared; gain of every arm, and the size of the KL."""
    runs = [run for arm in found["arms"].values() for run in arm["runs"].values()]
    positions = [run["kl_position"] for run in runs if run["kl_position"] > 0]
    size = f" The position KL is {min(positions):.0e} to {max(positions):.0e}." if positions else ""
    text = paragraph(
        f"""Lambda is held at kl_weight, and a moving anchor is refreshed every {ANCHOR_STEPS} updates.
        {setup_text(found)} With one update per rollout there are half as many updates and the velocity term is 0, so
        that "step" and "dual" differ from "none" and "moving" only by its gradient's noise, which today's code
        leaves out of a round's first update. What a trust region prevents would come later, so these short runs show
        only what it costs.{size} Gains:"""
    )
    rows = [["updates", "kl_weight", *STRATEGIES], ["---"] * (2 + len(STRATEGIES))]
    for updates, weight in PANELS:
        labels = [label_of(strategy, updates, weight) for strategy in STRATEGIES]
        gains = [str(gain(found, label)) if label in found["arms"] else "no run yet" for label in labels]
        rows.append([str(updates), f"{weight:g}", *gains])
    return "\n\n".join([text, "\n".join(f"| {' | '.join(row)} |" for row in rows)])


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """At each weight dual beats the others, and moving fixed; at one update the velocity term has no value."""
    result = []
    for updates, weight in PANELS[:-1]:
        label = {name: label_of(name, updates, weight) for name in STRATEGIES}
        where = f"at kl_weight {weight:g}"
        ahead = {name: difference(found, label["dual"], label[name]) for name in STRATEGIES if name != "dual"}
        result.append(claim_ahead(f"{where}, dual moving KL beats the others", "dual", ahead))
        ahead = {"fixed": difference(found, label["moving"], label["fixed"])}
        result.append(claim_ahead(f"{where}, a moving anchor beats a fixed one", "moving", ahead))
    return [*result, *_velocity_claim(found)]


def _velocity_claim(found: Mapping[str, Any]) -> list[Claim]:
    """The velocity KL at one update per rollout; no claim before there is a run."""
    single = [label_of(strategy, *PANELS[-1]) for strategy in ("step", "dual")]
    runs = [run for label in single if label in found["arms"] for run in found["arms"][label]["runs"].values()]
    if not runs:
        return []
    largest = max(run["largest_kl_velocity"] for run in runs)
    text = "at one update per rollout the velocity term of the dual KL is zero, so it can only add noise"
    return [Claim(text, HOLDS if largest < 1e-6 else FAILS, f"largest of {len(runs)} runs: {largest:.0e}")]


STUDY = Study("kl_strategies", "KL strategies", draw, describe, claims)

if __name__ == "__main__":
    sys.exit(publish_tuned(STUDY, arms, sys.argv[1:], __doc__, ROUNDS))
