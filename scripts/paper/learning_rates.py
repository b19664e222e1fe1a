"""One grid of learning rates for every sampler: how the studies of training runs are tuned, equally.

Example: `python -m scripts.paper.learning_rates`

The choice uses other seeds and prompts than the studies: two seeds of its own, and the first training prompts in place
of the held-out ones.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from scripts.paper.drawing import COLOURS, MARKERS, SAMPLERS, legend_below, new_figure, tidy
from scripts.paper.study import Claim, Study, paragraph, read_found
from scripts.paper.sweep import Arm, gains, parse_budget, setup_text, tiny_config, train_and_publish

RATES = (1e-5, 3e-5, 1e-4)
SEEDS = (101, 102)
ROUNDS = 12
NAME = "learning_rates"


def arms() -> list[Arm]:
    """Every sampler at every rate, measured on training prompts."""
    prompts = {"valid_video_csv": "assets/tiny/prompts/train.csv"}
    return [
        Arm(_label(sampler, rate), {"sde_type": sampler, "learning_rate": rate, **prompts})
        for rate in RATES
        for sampler in SAMPLERS
    ]


def _label(sampler: str, rate: float) -> str:
    return f"{SAMPLERS[sampler]} {rate:.0e}"


def tuned_rates(docs: Path) -> dict[str, float]:
    """Sampler -> its best rate in the published grid; empty until the whole grid is published."""
    path = docs / "claims" / f"{NAME}.json"
    return best_rates(read_found(path)) if path.is_file() else {}


def rate_of(sampler: str, docs: Path) -> float:
    """The sampler's tuned rate, or that of configs/tiny.yaml while none is tuned."""
    return tuned_rates(docs).get(sampler, tiny_config().optimizer.learning_rate)


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


def best_rates(found: Mapping[str, Any]) -> dict[str, float]:
    """Sampler -> the rate of the largest mean gain; empty while a run of the grid is missing."""
    seeds = {str(seed) for seed in found["budget"]["seeds"]}
    if any(seeds - set(gains(found, arm.label)) for arm in arms()):
        return {}
    return {sampler: max(RATES, key=lambda rate: _mean(found, sampler, rate)) for sampler in SAMPLERS}


def _mean(found: Mapping[str, Any], sampler: str, rate: float) -> float | None:
    """Mean gain over seeds, None without runs."""
    values = list(gains(found, _label(sampler, rate)).values())
    return sum(values) / len(values) if values else None


def draw(found: Mapping[str, Any]) -> Figure:
    """Mean gain over the rate, one line per sampler; single seeds as faint marks."""
    figure = new_figure(5.5, 3.6)
    axes = figure.subplots()
    for sampler, name in SAMPLERS.items():
        style = {"color": COLOURS[sampler], "marker": MARKERS[sampler]}
        known = [(rate, mean) for rate in RATES if (mean := _mean(found, sampler, rate)) is not None]
        if known:
            axes.plot(*zip(*known, strict=True), linewidth=1.4, markersize=5, label=name, **style)
        for rate, _ in known:
            values = gains(found, _label(sampler, rate)).values()
            axes.plot([rate] * len(values), list(values), linestyle="none", markersize=3, alpha=0.35, **style)
    axes.set_xscale("log")
    axes.set_xticks(RATES, labels=[f"{rate:g}" for rate in RATES])
    tidy(axes, xlabel="learning rate", ylabel="gain in reward, training prompts")
    legend_below(figure, axes, columns=4)
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say how the rates were chosen, and which."""
    best = best_rates(found)
    chosen = (
        ", ".join(f"{SAMPLERS[sampler]} {rate:.0e}" for sampler, rate in best.items()) or "none until the grid is whole"
    )
    return paragraph(
        f"""The same grid for every sampler, {" ".join(f"{rate:.0e}" for rate in RATES)}, with the equalizer on; the
        rate of the largest mean gain is what the studies below use: {chosen}. {setup_text(found)} Here the held-out
        prompts are the first training prompts, and the seeds are of their own, so that no study is tuned on what it
        is measured by. Runs without the equalizer take their sampler's rate too: AdamW does not feel the scale of a
        gradient."""
    )


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """No claims: this is how the other studies are tuned."""
    return []


STUDY = Study(NAME, "Learning rates, tuned equally", draw, describe, claims)

if __name__ == "__main__":
    budget = parse_budget(["--seeds", *map(str, SEEDS), *sys.argv[1:]], __doc__, ROUNDS)
    sys.exit(train_and_publish(STUDY, arms(), budget))
