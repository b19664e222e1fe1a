"""Arms x seeds: what a study of training runs asks for, what it reads back, and how arms are compared."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from hyvideo.config.flags import Parser
from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.evaluation.intervals import Interval, seed_interval
from hyvideo.models.fingerprint import fingerprint
from hyvideo.observability.metrics import read_metrics
from hyvideo.observability.scored_videos import read_scored_videos
from scripts.paper.drawing import interval_row, seeds_text
from scripts.paper.runs import CONFIG, REPOSITORY, Run, train
from scripts.paper.study import DOCS, FAILS, HOLDS, OPEN, Claim, Study, read_found

PHASES = ("rollout", "reward", "anchor", "update")
"""What a run's minutes count: not its validations."""

METRICS = ("reward", "Overall", "VQ", "MQ", "TA")
"""The trained reward, and what VideoAlign would call Overall: the sum of the three scores whatever was trained."""


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        label: in tables and pictures.
        settings: fields of the schema that differ from configs/tiny.yaml.
        rounds: how many it makes per round of the budget, so that cheap and expensive arms train for equal times.
    """

    label: str
    settings: Mapping[str, Any]
    rounds: float = 1.0


def parse_budget(
    argv: Sequence[str],
    description: str,
    rounds: int,
    looks: int = 1,
    *,
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    num_held_out: int = 128,
) -> argparse.Namespace:
    """Read the flags that all studies of training runs share.

    Args:
        argv: command line.
        description: for `--help`.
        rounds: the study's default.
        looks: times a run samples the held-out videos, the last one at its end.
        seeds: the study's default.
        num_held_out: the study's default.
    """
    jobs = 1 if torch.cuda.is_available() else os.cpu_count()
    parser = Parser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    shown = " ".join(map(str, seeds))
    add("--seeds", type=int, nargs="+", default=list(seeds), help=f"runs of every arm; default {shown}")
    add("--rounds", type=int, default=rounds, help=f"rounds of 32 videos per run; default {rounds}")
    add("--num_held_out", type=int, default=num_held_out, help="videos of each measurement; default %(default)s")
    add("--jobs", type=int, default=jobs, help="trainings at a time; default one per core, one on a GPU")
    add("--minutes", type=float, help="stop after this long and draw what there is (0: only draw); default no limit")
    add("--runs_dir", type=Path, default=Path("outputs/paper"), help="where runs lie; default outputs/paper")
    add("--docs", type=Path, default=DOCS, help="where picture, numbers and claims.md are written; default docs")
    add("--anew", action="store_true", help="train also what the numbers below --docs already hold")
    parser.set_defaults(looks=looks)
    return parser.parse_args(argv)


def train_and_publish(
    study: Study,
    arms: Sequence[Arm],
    budget: argparse.Namespace,
    *,
    more: Callable[[Run], Mapping[str, Any]] = lambda run: {},
    **about: Any,
) -> int:
    """Train what is missing, then publish what there is; returns the exit status (1 if a run failed).

    A run is not missing if any study has published its numbers with this base model, so a study may go on in another
    clone.

    Args:
        study: what the runs are for.
        arms: all get the same seeds, rounds and held-out videos (those of `valid_video_csv`, which they share); a seed
            of all arms comes before the next seed.
        budget: from `parse_budget`.
        more: what else to read of a finished run, as JSON can write it.
        about: settings to publish besides the budget.
    """
    base = base_run(arms, budget)
    runs = {(arm.label, seed): run_of(arm, seed, budget) for seed in budget.seeds for arm in arms}
    known = {} if budget.anew else published_runs(budget.docs)
    missing = [run for run in (base, *runs.values()) if run.folder.name not in known]
    failures = train(missing, jobs=budget.jobs, minutes=budget.minutes)
    for failure in failures:
        print(f"failed: {failure}", flush=True)
    read = {key: {**_read(run), **more(run)} for key, run in runs.items() if run.is_finished}
    found = _found(base, arms, runs, budget, known, read)
    if found is None:
        print("There is no finished run to draw yet: start the same command again to go on.")
    else:
        study.publish({**found, **about}, budget.docs)
    return 1 if failures else 0


def run_of(arm: Arm, seed: int, budget: argparse.Namespace) -> Run:
    """The run of an arm and a seed."""
    looks = budget.looks if budget.rounds % budget.looks == 0 else 1  # a look ends a round
    updates = looks * round(budget.rounds * arm.rounds / looks) * updates_per_rollout(arm)
    settings = {
        **arm.settings,
        "seed": seed,
        "max_steps": updates,
        "validation_interval": updates // looks,
        "validation_num_videos": budget.num_held_out,
        "save_interval": max(1, updates // 6),  # a kill costs a sixth at most
    }
    return Run.of(settings, budget.runs_dir)


def base_run(arms: Sequence[Arm], budget: argparse.Namespace) -> Run:
    """A single round whose held-out videos, those of the arms, are sampled before it: the base model."""
    settings = {
        **{name: value for name, value in arms[0].settings.items() if name == "valid_video_csv"},
        "seed": 0,
        "max_steps": 1,
        "validate_at_step0": True,
        "validation_interval": 0,
        "validation_num_videos": budget.num_held_out,
    }
    return Run.of(settings, budget.runs_dir, measured=0)


def updates_per_rollout(arm: Arm) -> int:
    """Optimizer updates of an arm in one round."""
    return arm.settings.get("updates_per_rollout", tiny_config().grpo.updates_per_rollout)


@cache
def tiny_config() -> Config:
    """What configs/tiny.yaml says, over the schema's defaults."""
    return load_config(["--config", str(CONFIG)])


@cache
def base_model() -> str:
    """The fingerprint of the bundled transformer."""
    return fingerprint([REPOSITORY / "assets" / "tiny" / "transformer"])


def published_runs(docs: Path) -> dict[str, dict[str, Any]]:
    """Name of a run's folder -> what it showed, from the raw numbers of all studies of this base model below `docs`."""
    studies = [read_found(path) for path in sorted((docs / "claims").glob("*.json"))]
    trained = [found for found in studies if "arms" in found and found["base"].get("model") == base_model()]
    runs = [run for found in trained for arm in found["arms"].values() for run in arm["runs"].values()]
    return {record["run"]: record for record in (*runs, *(found["base"] for found in trained))}


def _found(
    base: Run,
    arms: Sequence[Arm],
    runs: Mapping[tuple[str, int], Run],
    budget: argparse.Namespace,
    known: Mapping[str, Mapping[str, Any]],
    finished: Mapping[tuple[str, int], Mapping[str, Any]],
) -> dict[str, Any] | None:
    """What the runs show that are finished here or known; None without a base or without any run."""
    of_base = _means(base, 0) if base.is_finished else known.get(base.folder.name)
    shown = {key: finished.get(key) or known.get(run.folder.name) for key, run in runs.items()}
    read = {
        arm.label: {str(seed): shown[arm.label, seed] for seed in budget.seeds if shown[arm.label, seed]}
        for arm in arms
    }
    if not of_base or not any(read.values()):
        return None
    return {
        "budget": {"rounds": budget.rounds, "seeds": budget.seeds, "held_out": budget.num_held_out},
        "base": {**of_base, "run": base.folder.name, "model": base_model()},
        "arms": {
            arm.label: {"settings": dict(arm.settings), "runs": read[arm.label]} for arm in arms if read[arm.label]
        },
    }


def _read(run: Run) -> dict[str, Any]:
    """A run's held-out means over its updates and minutes, its spread at the end, and the KL terms it saw."""
    last, interval = run.settings["max_steps"], run.settings["validation_interval"]
    steps = [step for step in range(interval, last + 1) if run.scores_at(step).is_file()]
    looks = [_means(run, step) for step in steps]
    rows = read_metrics(run.folder / "metrics.jsonl")
    seconds = {row["step"]: sum(row.get(f"time/{phase}", 0.0) for phase in PHASES) for row in rows}
    columns = {name: [row.get(name, np.nan) for row in rows] for name in ("kl/position", "kl/velocity")}
    known = {name: np.array(values)[np.isfinite(values)] for name, values in columns.items()}
    return {
        "run": run.folder.name,
        "updates": steps,
        "minutes": [sum(seconds[step] for step in seconds if step <= look) / 60 for look in steps],
        "held_out": {metric: [look[metric] for look in looks] for metric in METRICS},
        "spread": looks[-1]["spread"],
        "kl_position": float(known["kl/position"].mean()) if len(known["kl/position"]) else 0.0,
        "largest_kl_velocity": float(np.abs(known["kl/velocity"]).max(initial=0.0)),
    }


def _means(run: Run, step: int) -> dict[str, float]:
    """Means of the held-out videos, and the std of their reward over videos."""
    videos = read_scored_videos(run.scores_at(step).parent)
    values = {metric: np.array([video.scores[metric] for video in videos]) for metric in METRICS if metric != "Overall"}
    values["Overall"] = values["VQ"] + values["MQ"] + values["TA"]
    means = {metric: float(np.nanmean(of_metric)) for metric, of_metric in values.items()}
    return {**means, "spread": float(np.nanstd(values["reward"], ddof=1))}


def gains(found: Mapping[str, Any], arm: str, metric: str = "reward") -> dict[str, float]:
    """Seed -> held-out gain over the base at the end of the run; empty for an arm without finished runs."""
    runs = found["arms"].get(arm, {"runs": {}})["runs"]
    return {seed: run["held_out"][metric][-1] - found["base"][metric] for seed, run in runs.items()}


def gain(found: Mapping[str, Any], arm: str, metric: str = "reward") -> Interval:
    """Held-out gain over the base, with its interval over seeds."""
    return seed_interval(list(gains(found, arm, metric).values()))


def difference(found: Mapping[str, Any], arm: str, other: str, metric: str = "reward") -> Interval | None:
    """Gain of `arm` minus that of `other`, paired by seed; None where they share no finished seed.

    Runs of one seed see the same prompts and start from the same noise.
    """
    own, theirs = gains(found, arm, metric), gains(found, other, metric)
    shared = [seed for seed in own if seed in theirs]
    return seed_interval([own[seed] - theirs[seed] for seed in shared]) if shared else None


def verdict(differences: Sequence[Interval | None]) -> str:
    """The verdict on "better than each of these": it holds if all intervals lie above 0, and fails if one lies below.

    Anything else is open, including an arm that is missing or has a single seed.
    """
    if any(interval is not None and interval.high < 0 for interval in differences):
        return FAILS
    return HOLDS if differences and all(d is not None and d.low > 0 for d in differences) else OPEN


def claim_ahead(text: str, name: str, ahead: Mapping[str, Interval | None]) -> Claim:
    """Claim that the arm called `name` is better than each of those in `ahead`, by its differences from them."""
    listed = "; ".join(f"{other} {interval or 'no pair yet'}" for other, interval in ahead.items())
    return Claim(text, verdict(list(ahead.values())), f"{name} minus {listed}")


def draw_arm(axes: Axes, place: float, found: Mapping[str, Any], arm: str, colour: str, metric: str = "reward") -> None:
    """Draw an arm's gain with its interval and seeds at row `place`; nothing before it has a finished run."""
    if arm in found["arms"]:
        interval_row(axes, place, gain(found, arm, metric), list(gains(found, arm, metric).values()), colour)


def setup_text(found: Mapping[str, Any]) -> str:
    """Say how long the runs are, how many seeds there are of every arm, and whether their rates were tuned."""
    budget = found["budget"]
    counts = [len(arm["runs"]) for arm in found["arms"].values()]
    least, most = min(counts), max(counts)
    seeds = seeds_text(most) if least == most else f"{least} to {seeds_text(most)}"
    unfinished = "" if least == len(budget["seeds"]) else f" (not all {len(budget['seeds'])} are finished)"
    untuned = "" if found["tuned"] else " Nothing is tuned yet, so rates and noise are those of configs/tiny.yaml."
    return (
        f"Every run has {budget['rounds']} rounds of 32 videos, with {seeds} per arm{unfinished}. The base model's "
        f"held-out reward is {found['base']['reward']:+.2f}.{untuned}"
    )
