"""One grid of learning rates for every sampler, with and without the equalizer: how the studies are tuned, equally.

Example: `python -m scripts.paper.learning_rates`

The choice uses other seeds and prompts than the studies: two seeds of its own, and the first training prompts in place
of the held-out ones.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.paper.drawing import COLOURS, MARKERS, SAMPLERS, legend_below, new_figure, seeds_text, tidy
from scripts.paper.study import Claim, Study, paragraph, read_found
from scripts.paper.sweep import Arm, gains, parse_budget, tiny_config, train_and_publish

RATES = (1e-5, 3e-5, 1e-4)
SEEDS = (101, 102)
ROUNDS = 12
NAME = "learning_rates"
SWITCH: dict[str, dict[str, Any]] = {"with": {}, "without": {"use_grad_balancing": False}}
"""The equalizer, which is on in configs/tiny.yaml."""

Tuned = dict[tuple[str, str], float]
"""(Sampler, with or without the equalizer) -> its best rate."""


def arms() -> list[Arm]:
    """Every sampler at every rate, with the equalizer and without, measured on training prompts."""
    prompts = {"valid_video_csv": "assets/tiny/prompts/train.csv"}
    return [
        Arm(_label(sampler, word, rate), {"sde_type": sampler, "learning_rate": rate, **prompts, **switch})
        for word, switch in SWITCH.items()
        for rate in RATES
        for sampler in SAMPLERS
    ]


def _label(sampler: str, word: str, rate: float) -> str:
    return f"{SAMPLERS[sampler]} {rate:.0e}{'' if word == 'with' else ', without equalizer'}"


def tuned_rates(docs: Path) -> Tuned:
    """The best rates in the published grid; empty until the whole grid is published."""
    path = docs / "claims" / f"{NAME}.json"
    return best_rates(read_found(path)) if path.is_file() else {}


def rate_of(sampler: str, docs: Path, word: str = "with") -> float:
    """The sampler's tuned rate with or without the equalizer, or that of configs/tiny.yaml while none is tuned."""
    return tuned_rates(docs).get((sampler, word), tiny_config().optimizer.learning_rate)


def publish_tuned(
    study: Study,
    arms_below: Callable[[Path], Sequence[Arm]],
    argv: Sequence[str],
    description: str,
    rounds: int,
    looks: int = 1,
) -> int:
    """Train what is missing of a study and publish it: the program of every study whose arms have tuned rates.

    Args:
        study: what the runs are for.
        arms_below: its arms, at the rates published below a docs folder.
        argv: command line.
        description: for `--help`.
        rounds: the study's default.
        looks: times a run samples the held-out videos; the same for arms that studies share.

    Returns:
        The exit status (1 if a run failed).
    """
    budget = parse_budget(argv, description, rounds, looks)
    return train_and_publish(study, arms_below(budget.docs), budget, tuned=bool(tuned_rates(budget.docs)))


def best_rates(found: Mapping[str, Any]) -> Tuned:
    """The rates of the largest mean gain; empty while a run of the grid is missing."""
    seeds = {str(seed) for seed in found["budget"]["seeds"]}
    if any(seeds - set(gains(found, arm.label)) for arm in arms()):
        return {}
    return {
        (sampler, word): max(RATES, key=lambda rate: _mean(found, sampler, word, rate))
        for sampler in SAMPLERS
        for word in SWITCH
    }


def _mean(found: Mapping[str, Any], sampler: str, word: str, rate: float) -> float | None:
    """Mean gain over seeds, None without runs."""
    values = list(gains(found, _label(sampler, word, rate)).values())
    return sum(values) / len(values) if values else None


def draw(found: Mapping[str, Any]) -> Figure:
    """Mean gain over the rate, one line per sampler; single seeds as faint marks."""
    figure = new_figure(8, 3.4)
    panels = figure.subplots(1, len(SWITCH), sharey=True)
    for axes, word in zip(panels, SWITCH, strict=True):
        for sampler in SAMPLERS:
            _line(axes, found, sampler, word)
        axes.set_xscale("log")
        axes.set_xticks(RATES, labels=[f"{rate:.0e}" for rate in RATES])
        tidy(axes, title=f"{word} the equalizer", xlabel="learning rate")
    panels[0].set_ylabel("gain in reward, training prompts", fontsize=9)
    legend_below(figure, panels[0], columns=4)
    return figure


def _line(axes: Axes, found: Mapping[str, Any], sampler: str, word: str) -> None:
    """Draw one sampler's grid."""
    style = {"color": COLOURS[sampler], "marker": MARKERS[sampler]}
    known = [(rate, mean) for rate in RATES if (mean := _mean(found, sampler, word, rate)) is not None]
    if known:
        axes.plot(*zip(*known, strict=True), linewidth=1.4, markersize=5, label=SAMPLERS[sampler], **style)
    for rate, _ in known:
        values = gains(found, _label(sampler, word, rate)).values()
        axes.plot([rate] * len(values), list(values), linestyle="none", markersize=3, alpha=0.35, **style)


def describe(found: Mapping[str, Any]) -> str:
    """Say how the rates were chosen, and which."""
    best, budget = best_rates(found), found["budget"]
    chosen = "; ".join(
        f"{word} the equalizer " + ", ".join(f"{SAMPLERS[sampler]} {best[sampler, word]:.0e}" for sampler in SAMPLERS)
        for word in SWITCH
        if best
    )
    return paragraph(
        f"""Every sampler is trained at {", ".join(f"{rate:.0e}" for rate in RATES)}, and the studies below use the rate
        with the largest mean gain: {chosen or "none until the grid is whole"}. Every run trains for {budget["rounds"]}
        rounds of 32 videos, with {seeds_text(len(budget["seeds"]))} per arm. Gains are measured on
        {budget["held_out"]} training prompts with separate seeds."""
    )


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """No claims: this is how the other studies are tuned."""
    return []


STUDY = Study(NAME, "Learning rates, tuned equally", draw, describe, claims)

if __name__ == "__main__":
    budget = parse_budget(["--seeds", *map(str, SEEDS), *sys.argv[1:]], __doc__, ROUNDS)
    sys.exit(train_and_publish(STUDY, arms(), budget))
