"""Studies of training runs read what runs leave, compare arms by seed and say what can be said, whole or in part."""

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from hyvideo.config.loading import load_config
from hyvideo.training.checks import check_config
from scripts.paper import equalizer, kl_strategies, over_optimization, results_table
from scripts.paper.runs import Run
from scripts.paper.study import DOCS, FAILS, HOLDS, OPEN, read_found
from scripts.paper.sweep import Arm, base_run, parse_budget, run_of, train_and_publish

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


NOISE = {1: 0.02, 2: -0.01, 3: 0.0, 4: 0.01, 5: -0.02}
"""What a seed adds to the gain of any arm."""

STUDIES = {module.STUDY.name: module for module in (equalizer, results_table, kl_strategies)}


def verdicts(path: Path) -> list[str]:
    return [claim["verdict"] for claim in read_found(path)["claims"]]


def published(folder: Path, name: str, *flags: str, gain=lambda arm, seed: 0.3 + NOISE[seed]) -> Path:
    """Finish all runs of a study with known gains, publish it, and return the file of its raw numbers."""
    budget = budget_of(folder, *flags)
    study, arms = STUDIES[name].STUDY, STUDIES[name].arms()
    finish(arms, budget, gain)
    assert train_and_publish(study, arms, budget) == 0
    return folder / "docs" / "claims" / f"{name}.json"


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_draws_and_describes_its_runs(tmp_path, name):
    path = published(tmp_path, name)
    assert path.is_file()
    assert "5 seeds per arm" in " ".join((tmp_path / "docs/claims.md").read_text().split())


@pytest.mark.parametrize("name", STUDIES)
def test_every_arm_is_a_configuration_that_can_be_trained(tmp_path, monkeypatch, name):
    monkeypatch.chdir(DOCS.parent)
    budget = budget_of(tmp_path)
    runs = [run_of(arm, 1, budget) for arm in STUDIES[name].arms()]
    for run in [base_run(budget), *runs]:
        check_config(load_config(run.commands()[0][2:]), 1)
    assert len({run.folder for run in runs}) == len(runs)


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (lambda on, noise: 5 * noise + 0.1 * on, HOLDS),  # seeds add more than the equalizer, but to both arms
        (lambda on, noise: noise - 0.1 * on, FAILS),
        (lambda on, noise: on * (noise + 0.005), OPEN),
    ],
)
def test_arms_are_compared_by_differences_of_the_same_seed(tmp_path, gain, expected):
    path = published(tmp_path, "equalizer", gain=lambda arm, s: gain(arm.settings["use_grad_balancing"], NOISE[s]))
    assert verdicts(path) == [expected] * 4


def test_a_study_goes_on_from_published_numbers_where_no_run_folder_is_left(tmp_path):
    finished = budget_of(tmp_path, "--seeds", "1", "2")
    published(tmp_path, "equalizer", "--seeds", "1", "2")
    first = read_found(tmp_path / "docs/claims/equalizer.json")
    shutil.rmtree(finished.runs_dir)

    budget = budget_of(tmp_path, "--seeds", "1", "2", "3")
    arms = equalizer.arms()
    for arm in arms:
        finish_run(run_of(arm, 3, budget), [3, 6], 0.4)
    assert train_and_publish(equalizer.STUDY, arms, budget) == 0
    second = read_found(tmp_path / "docs/claims/equalizer.json")
    assert second["base"] == first["base"]
    for label, arm in second["arms"].items():
        assert list(arm["runs"]) == ["1", "2", "3"]
        assert {seed: arm["runs"][seed] for seed in ("1", "2")} == first["arms"][label]["runs"]


@pytest.mark.parametrize("flags", [["--rounds", "6"], ["--anew"]])
def test_published_numbers_of_another_budget_are_not_taken_and_none_are_on_request(tmp_path, capsys, flags):
    published(tmp_path, "equalizer")
    budget = budget_of(tmp_path, "--runs_dir", str(tmp_path / "elsewhere"), *flags)
    assert train_and_publish(equalizer.STUDY, equalizer.arms(), budget) == 0
    assert "no finished run" in capsys.readouterr().out


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 24])
def test_every_run_is_measured_after_its_last_update(tmp_path, rounds):
    budget = budget_of(tmp_path, "--rounds", str(rounds))
    for updates in (1, 2):
        settings = run_of(Arm("a", {"updates_per_rollout": updates}), 1, budget).settings
        assert settings["max_steps"] % settings["validation_interval"] == 0
        assert settings["validation_interval"] % updates == 0


def write_looks(arms, budget, means) -> None:
    """Finish all runs with 32 scores at each of six looks, whose proxy and truth have these means."""
    finish(arms, budget, lambda arm, seed: NOISE[seed])
    for arm in arms:
        for seed in budget.seeds:
            run = run_of(arm, seed, budget)
            last = run.settings["max_steps"]
            for look in range(0, last + 1, last // 5):
                path = run.scores_at(look)
                path.parent.mkdir(parents=True, exist_ok=True)
                proxy, truth = means(arm, look / last)
                drawn = truth / 3 + np.random.default_rng((seed, look)).normal(size=32) / 3
                rows = [{"video": f"{n:03d}.mp4", "prompt": "", "reward": proxy} for n in range(32)]
                scores = [
                    row | dict.fromkeys(over_optimization.TRUTH, each) for row, each in zip(rows, drawn, strict=True)
                ]
                path.write_text("".join(json.dumps(row) + "\n" for row in scores))


def test_a_proxy_that_is_over_optimised_is_published_with_what_each_kl_keeps(tmp_path, monkeypatch):
    """Without a KL the truth rises and falls again; anchors hold back half of it and of the proxy, and dual all."""
    budget, arms = budget_of(tmp_path, "--rounds", "10"), over_optimization.arms()
    budget.looks = 5
    monkeypatch.chdir(DOCS.parent)
    for arm in arms:
        check_config(load_config(run_of(arm, 1, budget).commands()[0][2:]), 1)

    def means(arm, time):
        hacked = {"none": 20.0, "fixed": 10.0, "moving": 10.0, "dual": 0.0}[arm.label.split(",")[0]]
        return (1 + hacked) * time, 5 * min(time, 0.4) - hacked * max(0.0, time - 0.4)

    write_looks(arms, budget, means)
    assert train_and_publish(over_optimization.STUDY, arms, budget, more=over_optimization.looks_of) == 0
    path = tmp_path / "docs/claims/over_optimization.json"
    assert verdicts(path) == [HOLDS] * 4
    assert "at update 8 " in (tmp_path / "docs/claims.md").read_text()  # two fifths of 20 updates
    assert path.with_suffix(".png").stat().st_size < 150_000
