"""One grid of learning rate and noise for every sampler, with and without the equalizer: how the studies are tuned.

Example: `python -m scripts.paper.tuning`

The choice uses another seed and other prompts than the studies: the first training prompts in place of the held-out
ones.
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
from scripts.reports.markdown import markdown_table

RATES = (3e-5, 1e-4)
"""The study algorithm_rates also tried 1e-5 and 3e-4, and no algorithm learnt most there."""

ETAS = (0.25, 0.5, 0.7, 1.0)
"""The published ones, which are those of DanceGRPO, SAGE, and Flow-GRPO and CPS, and a higher one."""

CELLS = [(rate, eta) for rate in RATES for eta in ETAS]
SEEDS = (101,)
ROUNDS = 6
NAME = "tuning"
SWITCH: dict[str, dict[str, Any]] = {"with": {}, "without": {"use_grad_balancing": False}}
"""The equalizer, which is on in configs/tiny.yaml."""

Tuned = dict[tuple[str, str], tuple[float, float]]
"""(Sampler, with or without the equalizer) -> its best rate and eta."""


def arms() -> list[Arm]:
    """Every sampler at every rate and eta, with the equalizer and without, measured on training prompts."""
    prompts = {"valid_video_csv": "assets/tiny/prompts/train.csv"}
    return [
        Arm(
            _label(sampler, word, rate, eta),
            {"sde_type": sampler, "learning_rate": rate, "eta": eta, **prompts, **switch},
        )
        for word, switch in SWITCH.items()
        for rate, eta in CELLS
        for sampler in SAMPLERS
    ]


def _label(sampler: str, word: str, rate: float, eta: float) -> str:
    return f"{SAMPLERS[sampler]} {rate:.0e}, eta {eta:g}{'' if word == 'with' else ', without equalizer'}"


def tuned_cells(docs: Path) -> Tuned:
    """The best cells of the published grid; empty until the whole grid is published."""
    path = docs / "claims" / f"{NAME}.json"
    return best_cells(read_found(path)) if path.is_file() else {}


def tuned_settings(sampler: str, docs: Path, word: str = "with") -> dict[str, Any]:
    """The settings of a sampler at its tuned rate and noise.

    Args:
        sampler: its `sde_type`.
        docs: the folder below which the grid is published.
        word: "with" the equalizer or "without" it.

    Returns:
        `sde_type`, `learning_rate` and `eta`; the last two are those of configs/tiny.yaml while none are tuned.
    """
    config = tiny_config()
    rate, eta = tuned_cells(docs).get((sampler, word), (config.optimizer.learning_rate, config.rollout.eta))
    return {"sde_type": sampler, "learning_rate": rate, "eta": eta}


def publish_tuned(
    study: Study,
    arms_below: Callable[[Path], Sequence[Arm]],
    argv: Sequence[str],
    description: str,
    rounds: int,
) -> int:
    """Train what is missing of a study and publish it: the program of every study whose arms are tuned.

    Args:
        study: what the runs are for.
        arms_below: its arms, with the settings published below a docs folder.
        argv: command line.
        description: for `--help`.
        rounds: the study's default.

    Returns:
        The exit status (1 if a run failed).
    """
    budget = parse_budget(argv, description, rounds)
    return train_and_publish(study, arms_below(budget.docs), budget, tuned=bool(tuned_cells(budget.docs)))


def best_cells(found: Mapping[str, Any]) -> Tuned:
    """The cells of the largest mean gain; empty while a run of the grid is missing."""
    seeds = {str(seed) for seed in found["budget"]["seeds"]}
    if any(seeds - set(gains(found, arm.label)) for arm in arms()):
        return {}
    return {
        (sampler, word): max(CELLS, key=lambda cell: _mean(found, _label(sampler, word, *cell)))
        for sampler in SAMPLERS
        for word in SWITCH
    }


def _mean(found: Mapping[str, Any], label: str) -> float | None:
    """Mean gain over seeds, None without runs."""
    values = list(gains(found, label).values())
    return sum(values) / len(values) if values else None


def draw(found: Mapping[str, Any]) -> Figure:
    """Mean gain over eta, one panel per rate and switch, one line per sampler; single seeds as faint marks."""
    figure = new_figure(10, 3.2)
    panels = figure.subplots(1, len(SWITCH) * len(RATES), sharey=True)
    conditions = [(word, rate) for word in SWITCH for rate in RATES]
    for axes, (word, rate) in zip(panels, conditions, strict=True):
        for sampler in SAMPLERS:
            _line(axes, found, sampler, word, rate)
        axes.set_xticks(ETAS)
        tidy(axes, title=f"{word} equalizer, rate {rate:.0e}", xlabel="eta")
    panels[0].set_ylabel("gain in reward, training prompts", fontsize=9)
    legend_below(figure, panels[0], columns=4)
    return figure


def _line(axes: Axes, found: Mapping[str, Any], sampler: str, word: str, rate: float) -> None:
    """Draw one sampler at one rate."""
    style = {"color": COLOURS[sampler], "marker": MARKERS[sampler]}
    labels = {eta: _label(sampler, word, rate, eta) for eta in ETAS}
    known = [(eta, mean) for eta, label in labels.items() if (mean := _mean(found, label)) is not None]
    if known:
        axes.plot(*zip(*known, strict=True), linewidth=1.4, markersize=5, label=SAMPLERS[sampler], **style)
    for eta, _ in known:
        values = gains(found, labels[eta]).values()
        axes.plot([eta] * len(values), list(values), linestyle="none", markersize=3, alpha=0.35, **style)


def describe(found: Mapping[str, Any]) -> str:
    """Say how rate and noise were chosen, with a table of the choice and its gain."""
    best, budget = best_cells(found), found["budget"]
    rates, etas = ", ".join(f"{rate:.0e}" for rate in RATES), ", ".join(f"{eta:g}" for eta in ETAS)
    choice = "as in the table" if best else "none until the grid is whole"
    text = paragraph(
        f"""Every sampler is trained at the learning rates {rates} and the noise levels eta {etas}. A study that is
        tuned takes the cell with the largest mean gain, {choice}. Every run trains for {budget["rounds"]} rounds of 32
        videos, with {seeds_text(len(budget["seeds"]))} per arm. Gains are measured on {budget["held_out"]} training
        prompts, and the studies use other seeds."""
    )
    if not best:
        return text
    cells = {
        key: f"{rate:.0e}, eta {eta:g}: {_mean(found, _label(*key, rate, eta)):+.2f}"
        for key, (rate, eta) in best.items()
    }
    rows = [[name, *(cells[sampler, word] for word in SWITCH)] for sampler, name in SAMPLERS.items()]
    return f"{text}\n\n{markdown_table(['sampler', 'with the equalizer', 'without it'], rows)}"


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """No claims: this is how the other studies are tuned."""
    return []


STUDY = Study(NAME, "Learning rate and noise, tuned equally", draw, describe, claims)

if __name__ == "__main__":
    budget = parse_budget(sys.argv[1:], __doc__, ROUNDS, seeds=SEEDS)
    sys.exit(train_and_publish(STUDY, arms(), budget))
