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

from hyvideo.config.flags import Parser
from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.evaluation.intervals import Interval, seed_interval
from hyvideo.models.weight_files import fingerprint
from hyvideo.observability.metrics import read_metrics
from hyvideo.observability.scored_videos import read_scored_videos
from scripts.paper.runs import CONFIG, REPOSITORY, Run, train
from scripts.paper.study import DOCS, FAILS, HOLDS, OPEN, Claim, Study, read_found

METRICS = ("reward", "Overall", "VQ", "MQ", "TA")
"""The trained reward, and what VideoAlign would call Overall: the sum of the three scores whatever was trained."""

ROUNDS = 8
"""Rounds of 32 videos of a run, unless a study says otherwise."""

TUNED = {
    True: {"sage_grpo": (1e-4, 0.5), "flow_grpo": (1e-4, 1.0), "dance_grpo": (1e-4, 0.7), "cps": (1e-4, 1.0)},
    False: {"sage_grpo": (1e-4, 0.5), "flow_grpo": (1e-4, 1.0), "dance_grpo": (1e-4, 0.5), "cps": (3e-5, 0.5)},
}
"""With the equalizer or without -> sampler -> learning rate and eta that learnt most of the grid 3e-5, 1e-4 x 0.25,
0.5, 0.7, 1: one run of 6 rounds per cell with another seed, measured on 128 training prompts."""


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        label: in tables and pictures.
        settings: fields of the schema that differ from configs/tiny.yaml.
    """

    label: str
    settings: Mapping[str, Any]


def tuned(sampler: str, *, equalizer: bool = True) -> dict[str, Any]:
    """The settings of a sampler at its tuned rate and noise."""
    rate, eta = TUNED[equalizer][sampler]
    return {"sde_type": sampler, "learning_rate": rate, "eta": eta}


def parse_budget(
    argv: Sequence[str], description: str, rounds: int, looks: int = 1, *, num_held_out: int = 128
) -> argparse.Namespace:
    """Read the flags that all studies of training runs share.

    Args:
        argv: command line.
        description: for `--help`.
        rounds: the study's default.
        looks: times a run samples the held-out videos, the last one at its end.
        num_held_out: the study's default.
    """
    jobs = 1 if torch.cuda.is_available() else os.cpu_count()
    parser = Parser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="runs of every arm; default 1 2 3 4 5")
    add("--rounds", type=int, default=rounds, help=f"rounds of 32 videos per run; default {rounds}")
    add("--num_held_out", type=int, default=num_held_out, help="videos of each measurement; default %(default)s")
    add("--jobs", type=int, default=jobs, help="trainings at a time; default one per core, one on a GPU")
    add("--minutes", type=float, help="stop after this long and publish what there is (0: train none)")
    add("--runs_dir", type=Path, default=Path("outputs/paper"), help="where runs lie; default outputs/paper")
    add("--docs", type=Path, default=DOCS, help="where numbers and claims.md are written; default docs")
    add("--anew", action="store_true", help="train also what the numbers below --docs already hold")
    parser.set_defaults(looks=looks)
    return parser.parse_args(argv)


def train_and_publish(
    study: Study,
    arms: Sequence[Arm],
    budget: argparse.Namespace,
    *,
    more: Callable[[Run], Mapping[str, Any]] = lambda run: {},
) -> int:
    """Train what is missing, then publish what there is; returns the exit status (1 if a run failed).

    A run is not missing if any study has published its numbers with this base model, so a study may go on in another
    clone.

    Args:
        study: what the runs are for.
        arms: all get the same seeds, rounds and held-out videos; a seed of all arms comes before the next seed.
        budget: from `parse_budget`.
        more: what else to read of a finished run, as JSON can write it.
    """
    base = base_run(budget)
    runs = {(arm.label, seed): run_of(arm, seed, budget) for seed in budget.seeds for arm in arms}
    known = {} if budget.anew else published_runs(budget.docs)
    missing = [run for run in (base, *runs.values()) if run.folder.name not in known]
    failures = train(missing, jobs=budget.jobs, minutes=budget.minutes)
    for failure in failures:
        print(f"failed: {failure}", flush=True)
    of_base = _means(base, 0) if base.is_finished else known.get(base.folder.name)
    shown = {
        key: {**_read(run), **more(run)} if run.is_finished else known.get(run.folder.name) for key, run in runs.items()
    }
    read = {
        arm.label: {
            "settings": dict(arm.settings),
            "runs": {str(seed): shown[arm.label, seed] for seed in budget.seeds if shown[arm.label, seed]},
        }
        for arm in arms
    }
    read = {label: arm for label, arm in read.items() if arm["runs"]}
    if not of_base or not read:
        print("There is no finished run to show yet: start the same command again to go on.")
    else:
        given = {"rounds": budget.rounds, "seeds": budget.seeds, "held_out": budget.num_held_out}
        about_base = {**of_base, "run": base.folder.name, "model": base_model()}
        study.publish({"budget": given, "base": about_base, "arms": read}, budget.docs)
    return 1 if failures else 0


def run_of(arm: Arm, seed: int, budget: argparse.Namespace) -> Run:
    """The run of an arm and a seed."""
    looks = budget.looks if budget.rounds % budget.looks == 0 else 1  # a look ends a round
    updates = budget.rounds * arm.settings.get("updates_per_rollout", tiny_config().grpo.updates_per_rollout)
    settings = {
        **arm.settings,
        "seed": seed,
        "max_steps": updates,
        "validation_interval": updates // looks,
        "validation_num_videos": budget.num_held_out,
        "save_interval": max(1, updates // 6),  # a kill costs a sixth at most
    }
    return Run.of(settings, budget.runs_dir)


def base_run(budget: argparse.Namespace) -> Run:
    """A single round whose held-out videos are sampled before it: the base model."""
    settings = {
        "seed": 0,
        "max_steps": 1,
        "validate_at_step0": True,
        "validation_interval": 0,
        "validation_num_videos": budget.num_held_out,
    }
    return Run.of(settings, budget.runs_dir, measured=0)


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


def _read(run: Run) -> dict[str, Any]:
    """A run's held-out means over its updates, and the KL terms it saw."""
    last, interval = run.settings["max_steps"], run.settings["validation_interval"]
    steps = [step for step in range(interval, last + 1) if run.scores_at(step).is_file()]
    looks = [_means(run, step) for step in steps]
    rows = read_metrics(run.folder / "metrics.jsonl")
    distances = {name: np.array([row.get(f"kl/{name}", np.nan) for row in rows]) for name in ("position", "velocity")}
    position, velocity = (values[np.isfinite(values)] for values in distances.values())
    return {
        "run": run.folder.name,
        "updates": steps,
        "held_out": {metric: [look[metric] for look in looks] for metric in METRICS},
        "kl_position": float(position.mean()) if len(position) else 0.0,
        "largest_kl_velocity": float(np.abs(velocity).max(initial=0.0)),
    }


def _means(run: Run, step: int) -> dict[str, float]:
    """Means of the held-out videos."""
    videos = read_scored_videos(run.scores_at(step).parent)
    values = {metric: np.array([video.scores[metric] for video in videos]) for metric in METRICS if metric != "Overall"}
    values["Overall"] = values["VQ"] + values["MQ"] + values["TA"]
    return {metric: float(np.nanmean(of_metric)) for metric, of_metric in values.items()}


def gains(found: Mapping[str, Any], arm: str, metric: str = "reward") -> dict[str, float]:
    """Seed -> held-out gain over the base at the end of the run; empty for an arm without finished runs."""
    runs = found["arms"].get(arm, {"runs": {}})["runs"]
    return {seed: run["held_out"][metric][-1] - found["base"][metric] for seed, run in runs.items()}


def shown_gain(found: Mapping[str, Any], arm: str, metric: str = "reward") -> str:
    """Held-out gain over the base with its interval over seeds, for a table."""
    return str(seed_interval(list(gains(found, arm, metric).values()))) if arm in found["arms"] else "no run yet"


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


def setup_text(found: Mapping[str, Any]) -> str:
    """Say how long the runs are and how many seeds there are of every arm."""
    budget = found["budget"]
    counts = {len(arm["runs"]) for arm in found["arms"].values()}
    seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    unfinished = "" if min(counts) == len(budget["seeds"]) else f" (not all {len(budget['seeds'])} are finished)"
    return f"Every run has {budget['rounds']} rounds of 32 videos, with {seeds} seeds per arm{unfinished}."
