"""How well scripts.forecast foretells a run: predicted against observed held-out gains over set-ups and rates.

Example: `python -m scripts.paper.forecast`

Every set-up of sampler and batch is forecast once per seed for all rates, and trained once per seed and rate.
"""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import rankdata, spearmanr

from hyvideo.evaluation.intervals import Interval
from scripts.paper.drawing import BLUE, GREEN, RED, legend_below, new_figure, tidy
from scripts.paper.runs import CONFIG, REPOSITORY
from scripts.paper.study import FAILS, HOLDS, OPEN, Claim, Study, paragraph, read_found
from scripts.paper.sweep import Arm, base_model, gains, parse_budget, run_of, setup_text, train_and_publish
from scripts.reports.markdown import markdown_table

ROUNDS = 6
SEEDS, HELD_OUT, SAMPLED = (1, 2, 3, 4, 5), 64, 6
"""Of every set-up and rate; held-out videos of every measurement; rounds of a forecast."""

BAR = 0.8
"""Rank correlation that a forecast must have to be of use."""

RATES = (1e-5, 4e-5, 1.6e-4)
COLOURS = dict(zip(RATES, (BLUE, GREEN, RED), strict=True))

SETUPS: dict[str, dict[str, Any]] = {
    "configs/tiny.yaml": {},
    "eta 0.25": {"eta": 0.25},
    "10 steps": {"grpo_sampling_steps": 10},
    "CPS, eta 0.7": {"sde_type": "cps", "eta": 0.7},
    "window of the first 3": {"sde_window": "first", "sde_window_size": 3, "use_same_noise": True},
    "window of 2 per group": {"sde_window": "per_group", "sde_window_size": 2, "use_same_noise": True},
    "16 videos": {"batch_size": 16},
    "one update per round": {"updates_per_rollout": 1},
}
"""Settings over configs/tiny.yaml."""


def label_of(setup: str, rate: float) -> str:
    """Name the arm of a set-up and a rate."""
    return f"{setup}, {rate:.1e}"


def cells_asked() -> list[tuple[str, float]]:
    """Every set-up at every rate."""
    return [(name, rate) for rate in RATES for name in SETUPS]


def grid() -> list[Arm]:
    """What is trained for each of them."""
    return [Arm(label_of(name, rate), {**SETUPS[name], "learning_rate": rate}) for name, rate in cells_asked()]


def make_forecasts(budget: Namespace) -> tuple[dict[str, dict[str, Any]], int]:
    """Forecast what is not forecast yet, until the budget's minutes end.

    Returns:
        Set-up -> seed -> what was foretold; and how many forecasts failed.
    """
    deadline = time.monotonic() + 60 * budget.minutes if budget.minutes is not None else float("inf")
    path = budget.docs / "claims" / "forecast.json"
    known = read_found(path) if path.is_file() and not budget.anew else {"base": {}}
    sizes = {"rounds": budget.rounds, "held_out": budget.num_held_out}
    is_alike = known["base"].get("model") == base_model() and known["budget"].items() >= sizes.items()
    made = known["forecasts"] if is_alike else {}
    arms, failures = {arm.label: arm for arm in grid()}, []

    def one(name: str, seed: int) -> Mapping[str, Any] | None:
        """Forecast a set-up in a process of its own, as the trainings are."""
        if published := made.get(name, {}).get(str(seed)):
            return published
        run = run_of(arms[label_of(name, RATES[0])], seed, budget)
        folder = run.folder.with_name(f"forecast-{run.folder.name}")  # which has a hash of all settings
        if not (folder / "forecast.json").is_file() and time.monotonic() < deadline:
            print(f"forecasting {name}, seed {seed}\n", end="", flush=True)
            settings = {**SETUPS[name], "seed": seed, "max_steps": run.settings["max_steps"], "output_dir": folder}
            flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
            own = ["--num_rounds", str(SAMPLED), "--num_held_out", str(budget.num_held_out)]
            own += ["--rates", *map(str, RATES)]
            command = [sys.executable, "-m", "scripts.forecast", "--config", str(CONFIG), *flags, *own]
            log = folder.with_suffix(".log")
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("w") as file:
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                ended = subprocess.run(command, cwd=REPOSITORY, env=env, stdout=file, stderr=file, check=False)
            if ended.returncode:
                failures.append(log)
                print(f"failed: {name}, seed {seed}: status {ended.returncode}, see {log}\n", end="", flush=True)
        if not (folder / "forecast.json").is_file():
            return None
        found = json.loads((folder / "forecast.json").read_text())
        return {
            "base_std": found["base_std"],
            "best": found["groups"]["best"],
            "videos": found["gradient"]["videos"],
            **{  # all that the gain is worked out from, so that another formula can be tried
                part: {f"{one['rate']:.1e}": one[part]["mean"] for one in found["outlooks"]}
                for part in ("taught", "spoilt", "gain")
            },
        }

    asked = [(name, seed) for seed in budget.seeds for name in SETUPS]
    with ThreadPoolExecutor(budget.jobs) as pool:
        results = list(pool.map(lambda pair: one(*pair), asked))
    found: dict[str, dict[str, Any]] = {}
    for (name, seed), result in zip(asked, results, strict=True):
        if result:
            found.setdefault(name, {})[str(seed)] = result
    return found, len(failures)


def cells(found: Mapping[str, Any], seed: int | None = None) -> dict[tuple[str, float], tuple[float, float]]:
    """Set-up and rate -> predicted and observed gain in base std, of one seed or means over all; finished ones only."""
    forecasts = found["forecasts"]
    unit = np.mean([one["base_std"] for of in forecasts.values() for one in of.values()])
    pairs = {}
    for name, rate in cells_asked():
        predicted = {of: one["gain"][f"{rate:.1e}"] for of, one in forecasts.get(name, {}).items()}
        both = [
            [value for of, value in values.items() if seed is None or of == str(seed)]
            for values in (predicted, gains(found, label_of(name, rate)))
        ]
        if all(both):
            pairs[name, rate] = tuple(float(np.mean(values) / unit) for values in both)
    return pairs


def mean_error(pairs: Mapping[Any, tuple[float, float]]) -> float:
    """Mean absolute difference of predicted and observed gains."""
    return float(np.mean([abs(predicted - observed) for predicted, observed in pairs.values()]))


def about_seeds(found: Mapping[str, Any]) -> str:
    """Say how far the forecasts of one seed are off, and how far seeds agree; nothing without two seeds."""
    of_seeds = [cells(found, seed) for seed in found["budget"]["seeds"]]
    shared = [key for key in of_seeds[0] if all(key in of for of in of_seeds)]
    if len(of_seeds) < 2 or len(shared) < 3:
        return ""
    agreements = []
    for number in range(2):  # the predicted gains, then the observed ones
        ranks = [rankdata([of[key][number] for key in shared]) for of in of_seeds]
        agreements.append(np.corrcoef(ranks)[np.triu_indices(len(of_seeds), 1)].mean())
    return paragraph(
        f"""With one seed alone the forecast is off by {np.mean([mean_error(of) for of in of_seeds]):.2f} base std on
        average. From one seed to another the forecasts have a rank correlation of {agreements[0]:.2f} over set-ups
        and rates on average, and the gains one of {agreements[1]:.2f}, so one short run tells only part of another."""
    )


def rank_correlation(pairs: Sequence[tuple[float, float]], num_resamples: int = 2000) -> Interval:
    """Spearman's rank correlation of N pairs, with the percentile bootstrap over pairs."""
    values = np.array(pairs)
    rng = np.random.default_rng(0)
    drawn = [values[rng.integers(0, len(values), len(values))] for _ in range(num_resamples)]
    resampled = [spearmanr(*sample.T).statistic for sample in drawn if len(np.unique(sample, axis=0)) > 2]
    low, high = np.percentile(resampled, (2.5, 97.5)) if resampled else (np.nan, np.nan)
    return Interval(float(spearmanr(*values.T).statistic), float(low), float(high), len(values))


def draw(found: Mapping[str, Any]) -> Figure:
    """Observed over predicted gain, a point per set-up and rate."""
    figure = new_figure(5.5, 4.5)
    axes, pairs = figure.subplots(), cells(found)
    for rate, colour in COLOURS.items():
        if own := [pair for (_, of), pair in pairs.items() if of == rate]:
            axes.plot(*np.array(own).T, "o", color=colour, markersize=6, alpha=0.8, label=f"rate {rate:.1e}")
    ends = [min(map(min, pairs.values())), max(map(max, pairs.values()))]
    axes.plot(ends, ends, color="0.6", linewidth=0.8, linestyle=":")
    tidy(axes, xlabel="predicted gain in base std", ylabel="observed gain in base std")
    legend_below(figure, axes, columns=len(RATES))
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say what was foretold and what came, set-up by set-up."""
    pairs = cells(found)
    whole = [name for name in SETUPS if all((name, rate) in pairs for rate in RATES)]
    right = sum(
        max(RATES, key=lambda rate, name=name: pairs[name, rate][0])
        == max(RATES, key=lambda rate, name=name: pairs[name, rate][1])
        for name in whole
    )
    text = paragraph(
        f"""{setup_text(found)} Those of *16 videos* have half as many. Each set-up is forecast from {SAMPLED} rounds
        and trial steps with {found["budget"]["held_out"]} held-out videos, with the seeds of its runs. A point is the
        mean over seeds. The forecast is off by {mean_error(pairs):.2f} base std on average. In {right} of {len(whole)}
        set-ups the rate that it calls best is the best of the {len(RATES)} observed ones."""
    )
    rows = []
    for name in SETUPS:
        shown = [pairs.get((name, rate)) for rate in RATES]
        if any(shown):
            rows.append([name, *(f"{pair[0]:+.2f}, {pair[1]:+.2f}" if pair else "" for pair in shown)])
    header = ["set-up", *(f"{rate:.1e}: predicted, observed" for rate in RATES)]
    return "\n\n".join(filter(None, (text, about_seeds(found), markdown_table(header, rows))))


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """The order of the forecasts is that of the gains."""
    correlation = rank_correlation(list(cells(found).values()))
    told = HOLDS if correlation.low >= BAR else FAILS if correlation.high < BAR else OPEN
    evidence = f"{correlation} over {correlation.num} set-ups and rates"
    return [Claim(f"forecasts and gains have a rank correlation of {BAR} or more", told, evidence)]


STUDY = Study("forecast", "Forecasts against what came", draw, describe, claims)


def publish(budget: Namespace) -> int:
    """Forecast, train, and publish what there is; returns the exit status."""
    started = time.monotonic()
    forecasts, failed = make_forecasts(budget)
    if budget.minutes:
        budget.minutes = max(0.0, budget.minutes - (time.monotonic() - started) / 60)
    status = train_and_publish(STUDY, grid(), budget, tuned=True, forecasts=forecasts)
    return 1 if failed else status


if __name__ == "__main__":
    sys.exit(publish(parse_budget(sys.argv[1:], __doc__, ROUNDS, seeds=SEEDS, num_held_out=HELD_OUT)))
