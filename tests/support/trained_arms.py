"""Run folders of the paper's studies as finished trainings leave them, with scores that are known."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.paper.runs import Run
from scripts.paper.sweep import Arm, base_run, parse_budget, run_of

METRICS = ("VQ", "MQ", "TA")
MINUTE = 60.0


def budget_of(folder: Path, *flags: str) -> argparse.Namespace:
    """Return a budget of three rounds that trains nothing and writes below `folder`."""
    places = ["--runs_dir", str(folder / "runs"), "--docs", str(folder / "docs")]
    return parse_budget(["--rounds", "3", "--num_held_out", "4", "--minutes", "0", *places, *flags], "a study", 3)


def finish(arms: Sequence[Arm], budget: argparse.Namespace, gain: Callable[[Arm, int], float]) -> None:
    """Write the base, and every arm and seed of the budget with `gain(arm, seed)` per metric at the run's end."""
    finish_run(base_run(budget), [0], 0.0)
    for arm in arms:
        for seed in budget.seeds:
            run = run_of(arm, seed, budget)
            interval = run.settings["validation_interval"]
            finish_run(run, range(interval, run.settings["max_steps"] + 1, interval), gain(arm, seed))


def finish_run(run: Run, looks: Sequence[int], gain: float) -> None:
    """Write what a run leaves: held-out scores at `looks`, rising to `gain`, and its metrics."""
    for look in looks:
        path = run.scores_at(look)
        path.parent.mkdir(parents=True)
        reached = gain * look / run.settings["max_steps"]
        values = {f"{number:03d}.mp4": reached + number - 1.0 for number in range(3)}
        rows = [
            {"video": video, "prompt": "a shape", "reward": 2 * value, **dict.fromkeys(METRICS, value)}
            for video, value in values.items()
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = sorted({run.settings["max_steps"], *looks} - {0})
    rows = [{"step": step, "kl/position": 1e-3, "kl/velocity": 0.0, "time/rollout": MINUTE} for step in steps]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
