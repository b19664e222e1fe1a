"""SAGE-GRPO beside Flow-GRPO, GRPO-Guard and DiffusionNFT, each at the best rate of its grid, for equal core-minutes.

Example: `python -m scripts.paper.algorithm_rates`, then `python -m scripts.paper.algorithms`

Runs of a cheaper algorithm have more rounds, in proportion to its passes per video. They are compared at the time of
the shortest run, as measured, between the looks at the held-out videos.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hyvideo.algorithms.algorithm import Evaluations, algorithm_class
from hyvideo.config.loading import load_config
from hyvideo.evaluation.intervals import Interval, seed_interval
from scripts.paper.drawing import BLACK, BLUE, GREEN, ORANGE, RED, legend_below, new_figure, tidy
from scripts.paper.runs import CONFIG
from scripts.paper.study import Claim, Study, paragraph, read_found
from scripts.paper.sweep import Arm, claim_ahead, gains, parse_budget, setup_text, tiny_config, train_and_publish
from scripts.reports.markdown import markdown_table

ROUNDS, LOOKS = 12, 3
RATES = (1e-5, 3e-5, 1e-4, 3e-4)
_FLOW = {"sde_type": "flow_grpo", "use_grad_balancing": False, "advantage_std": "global", "kl_weight": 0.0}
_NFT = {"algorithm": "nft", "timestep_fraction": 0.5, "advantage_std": "global"}
_EMA = {"ema_decay": 0.9, "validation_weights": "ema"}

METHODS: dict[str, dict[str, Any]] = {
    "SAGE-GRPO": {"sde_type": "sage_grpo"},
    "Flow-GRPO": _FLOW,
    "GRPO-Guard": {**_FLOW, "ratio_norm": True, "use_grad_balancing": True, "clip_range": 1e-5},
    "NFT": _NFT,
    "NFT, EMA": {**_NFT, **_EMA},
}
"""Settings over configs/tiny.yaml. The average changes what is measured and not what is trained."""

COLOURS = dict(zip(METHODS, (BLUE, RED, ORANGE, GREEN, BLACK), strict=True))


def cost(settings: Mapping[str, Any]) -> Evaluations:
    """Count the passes per video of a method."""
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    config = load_config(["--config", str(CONFIG), *flags])
    return algorithm_class(config.grpo.algorithm).evaluations(config)


def work(settings: Mapping[str, Any]) -> float:
    """Passes per video, in forward passes: one with gradient counts as three."""
    passes = cost(settings)
    return passes.rollout + passes.anchor + 3 * passes.update


def grid() -> list[Arm]:
    """Every method at every rate, measured on training prompts; an average of weights takes its method's rate."""
    prompts = {"valid_video_csv": "assets/tiny/prompts/train.csv"}
    return [
        Arm(f"{name} {rate:.0e}", {**settings, **prompts, "learning_rate": rate}, _rounds(settings))
        for rate in RATES
        for name, settings in METHODS.items()
        if "ema_decay" not in settings
    ]


def arms(docs: Path) -> list[Arm]:
    """Every method at the best rate of the published grid, or at that of configs/tiny.yaml while there is none."""
    rates, usual = best_rates(docs), tiny_config().optimizer.learning_rate
    return [
        Arm(name, {**settings, "learning_rate": rates.get(name.removesuffix(", EMA"), usual)}, _rounds(settings))
        for name, settings in METHODS.items()
    ]


def _rounds(settings: Mapping[str, Any]) -> float:
    return work(METHODS["SAGE-GRPO"]) / work(settings)


def best_rates(docs: Path) -> dict[str, float]:
    """Method -> the rate of its largest mean gain in the published grid; empty until the whole grid is published."""
    path = docs / "claims" / "algorithm_rates.json"
    found = read_found(path) if path.is_file() else None
    if found is None or any(len(gains(found, arm.label)) < len(found["budget"]["seeds"]) for arm in grid()):
        return {}
    means = {arm.label: np.mean(list(gains(found, arm.label).values())) for arm in grid()}
    names = [name for name, settings in METHODS.items() if "ema_decay" not in settings]
    return {name: max(RATES, key=lambda rate, name=name: means[f"{name} {rate:.0e}"]) for name in names}


def curves(found: Mapping[str, Any], name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Seed -> minutes and held-out gains over the base at every look, from the base at 0 on."""
    runs = found["arms"].get(name, {"runs": {}})["runs"]
    base = found["base"]["reward"]
    return {
        seed: (
            np.array([0.0, *run["minutes"]]),
            np.array([0.0, *(value - base for value in run["held_out"]["reward"])]),
        )
        for seed, run in runs.items()
    }


def shortest(found: Mapping[str, Any]) -> float:
    """Minutes of the shortest run."""
    return min(minutes[-1] for name in METHODS for minutes, _ in curves(found, name).values())


def gains_at(found: Mapping[str, Any], name: str, minutes: float) -> dict[str, float]:
    """Seed -> held-out gain after so many core-minutes, on the line between two looks."""
    return {seed: float(np.interp(minutes, *curve)) for seed, curve in curves(found, name).items()}


def draw(found: Mapping[str, Any]) -> Figure:
    """Mean gain over core-minutes, with a band of the interval over seeds."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for name, colour in COLOURS.items():
        if own := list(curves(found, name).values()):
            times = np.linspace(0, min(minutes[-1] for minutes, _ in own), 40)
            bands = [seed_interval([float(np.interp(time, *curve)) for curve in own]) for time in times]
            axes.plot(times, [band.mean for band in bands], color=colour, linewidth=1.6, label=name)
            axes.fill_between(times, [b.low for b in bands], [b.high for b in bands], color=colour, alpha=0.12)
    axes.axvline(shortest(found), color="0.6", linewidth=0.8, linestyle=":")
    tidy(axes, xlabel="core-minutes, without validation", ylabel="gain in held-out reward")
    legend_below(figure, axes, columns=len(METHODS))
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say what was compared; passes, minutes and gain of every method."""
    end = shortest(found)
    text = paragraph(
        f"""{setup_text(found)} That is for SAGE-GRPO; a method with fewer passes per video has more rounds. Gains are
        those after {end:.1f} core-minutes, the time of the shortest run. These are verdicts on the tiny model in runs
        of minutes."""
    )
    rows = []
    for name, settings in METHODS.items():
        if own := curves(found, name):
            passes = cost(settings)
            counted = f"{passes.rollout:g}, {passes.anchor}, {passes.update}"
            minutes = np.mean([curve[0][-1] for curve in own.values()])
            rate = found["arms"][name]["settings"]["learning_rate"]
            gained = seed_interval(list(gains_at(found, name, end).values()))
            rows.append([name, f"{rate:.0e}", counted, f"{minutes:.1f}", str(gained)])
    header = ["method", "rate", "passes per video: rollout, anchor, update", "minutes", "gain"]
    return f"{text}\n\n{markdown_table(header, rows)}"


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """SAGE-GRPO is ahead of each other method, and an average of NFT's weights of the weights."""
    end = shortest(found)
    own = {name: gains_at(found, name, end) for name in METHODS}

    def ahead(name: str, others: Sequence[str]) -> dict[str, Interval | None]:
        """Differences paired by seed."""
        pairs = {
            other: [own[name][seed] - own[other][seed] for seed in own[name] if seed in own[other]] for other in others
        }
        return {other: seed_interval(values) if values else None for other, values in pairs.items()}

    others = [name for name in METHODS if name != "SAGE-GRPO"]
    return [
        claim_ahead("in equal core-minutes SAGE-GRPO is ahead of the others", "SAGE-GRPO", ahead("SAGE-GRPO", others)),
        claim_ahead("in equal core-minutes NFT is ahead of SAGE-GRPO", "NFT", ahead("NFT", ["SAGE-GRPO"])),
        claim_ahead("the average of NFT's weights is ahead of the weights", "EMA", ahead("NFT, EMA", ["NFT"])),
    ]


STUDY = Study("algorithms", "Algorithms side by side", draw, describe, claims)

if __name__ == "__main__":
    budget = parse_budget(sys.argv[1:], __doc__, ROUNDS, LOOKS)
    sys.exit(train_and_publish(STUDY, arms(budget.docs), budget, tuned=bool(best_rates(budget.docs))))
