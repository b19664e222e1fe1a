"""Studies of training runs read what runs leave, compare arms by seed and say what can be said, whole or in part."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hyvideo.config.loading import load_config
from hyvideo.training.checks import check_config
from scripts.paper import (
    algorithm_rates,
    algorithms,
    equalizer,
    forecast,
    guard,
    kl_strategies,
    over_optimization,
    results_table,
    reward_settings,
    tuning,
)
from scripts.paper.drawing import SAMPLERS
from scripts.paper.study import DOCS, FAILS, HOLDS, OPEN, read_found
from scripts.paper.sweep import Arm, base_model, base_run, run_of, tiny_config, train_and_publish
from tests.support.trained_arms import budget_of, finish, finish_run

NOISE = {1: 0.02, 2: -0.01, 3: 0.0, 4: 0.01, 5: -0.02, 101: 0.0, 102: 0.01}
"""What a seed adds to the gain of any arm."""

STUDIES = {
    "equalizer": (equalizer.STUDY, equalizer.arms),
    "results_table": (results_table.STUDY, results_table.arms),
    "reward_settings": (reward_settings.STUDY, reward_settings.arms),
    "kl_strategies": (kl_strategies.STUDY, kl_strategies.arms),
    "tuning": (tuning.STUDY, lambda docs: tuning.arms()),
    "algorithms": (algorithms.STUDY, algorithms.arms),
    "algorithm_rates": (algorithm_rates.STUDY, lambda docs: algorithms.grid()),
}


def verdicts(path: Path) -> list[str]:
    return [claim["verdict"] for claim in read_found(path)["claims"]]


def published(folder: Path, name: str, *flags: str, gain=lambda arm, seed: 0.3 + NOISE[seed]) -> Path:
    """Finish all runs of a study with known gains, publish it, and return the file of its raw numbers."""
    study, arms_of = STUDIES[name]
    budget = budget_of(folder, *flags)
    arms = arms_of(budget.docs)
    finish(arms, budget, gain)
    assert train_and_publish(study, arms, budget, tuned=False) == 0
    return folder / "docs" / "claims" / f"{name}.json"


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_draws_and_describes_its_runs(tmp_path, name):
    path = published(tmp_path, name)
    assert path.with_suffix(".png").stat().st_size < 150_000
    assert "5 seeds per arm" in " ".join((tmp_path / "docs/claims.md").read_text().split())


@pytest.mark.parametrize("name", STUDIES)
def test_every_arm_is_a_configuration_that_can_be_trained(tmp_path, monkeypatch, name):
    monkeypatch.chdir(DOCS.parent)
    budget = budget_of(tmp_path)
    runs = [run_of(arm, 1, budget) for arm in STUDIES[name][1](budget.docs)]
    for run in [base_run(STUDIES[name][1](budget.docs), budget), *runs]:
        check_config(load_config(run.command()[2:]), 1)
    assert len({run.folder for run in runs}) == len(runs)


def test_a_forecast_is_judged_by_the_order_of_what_came(tmp_path, monkeypatch):
    """Half of what was foretold comes: the order is right, so the correlation is 1 whatever the size."""
    budget = budget_of(tmp_path, "--seeds", "1", "2", "3")
    foretold = {(name, rate): 0.1 * i for i, (name, rate) in enumerate(forecast.cells_asked())}
    arms = {arm.label: arm for arm in forecast.grid()}
    for name in forecast.SETUPS:
        for seed, off in zip(budget.seeds, (0.4, 0.0, -0.4), strict=True):
            run = run_of(arms[forecast.label_of(name, forecast.RATES[0])], seed, budget)
            folder = run.folder.with_name(f"forecast-{run.folder.name}")
            folder.mkdir(parents=True)
            outlooks = [
                {"rate": rate, **{part: {"mean": foretold[name, rate] + off} for part in ("taught", "spoilt", "gain")}}
                for rate in forecast.RATES
            ]
            found = {"base_std": 2.0, "groups": {"best": 1.0}, "gradient": {"videos": 300.0}, "outlooks": outlooks}
            (folder / "forecast.json").write_text(json.dumps(found))
    by_label = {forecast.label_of(name, rate): gain for (name, rate), gain in foretold.items()}
    finish(forecast.grid(), budget, lambda arm, seed: by_label[arm.label] / 4)  # the reward is twice the metric
    path = tmp_path / "docs" / "claims" / "forecast.json"
    for _ in range(2):  # the second time from what was published
        assert forecast.publish(budget) == 0
        found = read_found(path)
        assert verdicts(path) == [HOLDS]
        assert forecast.rank_correlation(list(forecast.cells(found).values())).mean == pytest.approx(1)
        name, rate = forecast.cells_asked()[-1]
        assert forecast.cells(found)[name, rate] == pytest.approx((0.05 * 23, 0.025 * 23))
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    told = " ".join((tmp_path / "docs/claims.md").read_text().split())
    assert "8 of 8 set-ups" in told and "the forecasts have a rank correlation of 1.00" in told
    assert "The forecast is off by 0.29 base std" in told and "With one seed alone the forecast is off by 0.31" in told
    budget.minutes = None
    monkeypatch.setattr(forecast.subprocess, "run", None)
    assert forecast.make_forecasts(budget) == (found["forecasts"], 0)  # what is published is not made again
    for other in (("--num_held_out", "8"), ("--rounds", "6")):
        assert forecast.make_forecasts(budget_of(tmp_path, *other)) == ({}, 0)
    folder.mkdir(parents=True)
    (folder / "forecast.json").write_text("{}")  # of older code, for example
    assert forecast.make_forecasts(budget) == (found["forecasts"], 0)


def test_a_forecast_without_order_does_not_hold():
    rng = np.random.default_rng(1)
    found = forecast.rank_correlation(rng.normal(size=(24, 2)).tolist())
    assert found.low < 0 < found.high and found.high < forecast.BAR


def test_algorithms_train_at_their_best_rates_and_are_compared_after_equal_times(tmp_path):
    """Runs gain evenly over their looks, a minute each, and NFT has more of the same looks' length."""
    best = dict(zip(("SAGE-GRPO", "Flow-GRPO", "GRPO-Guard", "NFT"), algorithms.RATES, strict=True))
    published(
        tmp_path,
        "algorithm_rates",
        *("--seeds", "101", "102"),
        gain=lambda arm, seed: float(arm.label == f"{arm.label[:-6]} {best[arm.label[:-6]]:.0e}"),
    )
    arms = {arm.label: arm for arm in algorithms.arms(tmp_path / "docs")}
    assert {name: arms[name].settings["learning_rate"] for name in best} == best
    assert arms["NFT, EMA"].settings["learning_rate"] == best["NFT"]
    assert arms["NFT"].rounds == pytest.approx(30 / 18)

    reached = {"SAGE-GRPO": 0.2, "Flow-GRPO": 0.1, "GRPO-Guard": 0.1, "NFT": 0.3, "NFT, EMA": 0.3}
    path = published(tmp_path, "algorithms", gain=lambda arm, seed: reached[arm.label] + NOISE[seed] / 10)
    found = read_found(path)
    assert algorithms.shortest(found) == 1.0
    assert algorithms.gains_at(found, "NFT", 0.5)["3"] == pytest.approx(algorithms.gains_at(found, "NFT", 1.0)["3"] / 2)
    assert verdicts(path) == [FAILS, HOLDS, OPEN]


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


def test_better_than_all_needs_to_be_better_than_each(tmp_path):
    tie = {"sage_grpo": 0.3, "cps": 0.3}
    path = published(
        tmp_path,
        "results_table",
        gain=lambda arm, s: (
            tie.get(arm.settings["sde_type"], 0.0) + NOISE[s] / (1 if arm.settings["sde_type"] == "cps" else 2)
        ),
    )
    assert verdicts(path) == [OPEN, OPEN]
    evidence = read_found(path)["claims"][0]["evidence"]
    assert "Flow-GRPO +0.9" in evidence and "CPS +0.0" in evidence


def test_a_single_seed_gives_means_and_no_verdict(tmp_path):
    path = published(
        tmp_path, "equalizer", "--seeds", "3", gain=lambda arm, s: 0.1 * arm.settings["use_grad_balancing"]
    )
    assert verdicts(path) == [OPEN] * 4
    assert "1 seed per arm" in " ".join((tmp_path / "docs/claims.md").read_text().split())


def test_what_is_finished_is_drawn_and_what_is_missing_is_said(tmp_path):
    budget = budget_of(tmp_path)
    arms = equalizer.arms(budget.docs)
    finish(arms[:2], budget_of(tmp_path, "--seeds", "1", "2"), lambda arm, seed: 0.2)
    assert train_and_publish(equalizer.STUDY, arms, budget, tuned=False) == 0
    text = " ".join((tmp_path / "docs/claims.md").read_text().split())
    assert "2 seeds per arm (not all 5 are finished)" in text and "| CPS | no run yet |" in text


def test_a_study_goes_on_from_published_numbers_where_no_run_folder_is_left(tmp_path):
    finished = budget_of(tmp_path, "--seeds", "1", "2")
    published(tmp_path, "equalizer", "--seeds", "1", "2")
    first = read_found(tmp_path / "docs/claims/equalizer.json")
    shutil.rmtree(finished.runs_dir)

    budget = budget_of(tmp_path, "--seeds", "1", "2", "3")
    arms = equalizer.arms(budget.docs)
    for arm in arms:
        finish_run(run_of(arm, 3, budget), [3, 6], 0.4)
    assert train_and_publish(equalizer.STUDY, arms, budget, tuned=False) == 0
    second = read_found(tmp_path / "docs/claims/equalizer.json")
    assert second["base"] == first["base"]
    for label, arm in second["arms"].items():
        assert list(arm["runs"]) == ["1", "2", "3"]
        assert {seed: arm["runs"][seed] for seed in ("1", "2")} == first["arms"][label]["runs"]


def test_a_study_takes_runs_that_another_has_published(tmp_path):
    published(tmp_path, "equalizer")
    budget = budget_of(tmp_path, "--runs_dir", str(tmp_path / "elsewhere"))
    assert train_and_publish(results_table.STUDY, results_table.arms(budget.docs), budget, tuned=False) == 0
    arms = read_found(tmp_path / "docs/claims/results_table.json")["arms"]
    assert {label: len(arm["runs"]) for label, arm in arms.items()} == {
        results_table.label_of(sampler, "B"): 5 for sampler in SAMPLERS
    }


@pytest.mark.parametrize("flags", [["--rounds", "6"], ["--anew"]])
def test_published_numbers_of_another_budget_are_not_taken_and_none_are_on_request(tmp_path, capsys, flags):
    published(tmp_path, "equalizer")
    budget = budget_of(tmp_path, "--runs_dir", str(tmp_path / "elsewhere"), *flags)
    assert train_and_publish(equalizer.STUDY, equalizer.arms(budget.docs), budget, tuned=False) == 0
    assert "no finished run" in capsys.readouterr().out


def test_published_numbers_of_another_base_model_are_not_taken(tmp_path, capsys):
    path = published(tmp_path, "equalizer")
    path.write_text(path.read_text().replace(base_model(), "another"))
    budget = budget_of(tmp_path, "--runs_dir", str(tmp_path / "elsewhere"))
    assert train_and_publish(equalizer.STUDY, equalizer.arms(budget.docs), budget, tuned=False) == 0
    assert "no finished run" in capsys.readouterr().out


def test_without_any_run_nothing_is_written(tmp_path, capsys):
    budget = budget_of(tmp_path)
    assert train_and_publish(equalizer.STUDY, equalizer.arms(budget.docs), budget, tuned=False) == 0
    assert "no finished run" in capsys.readouterr().out and not (tmp_path / "docs").exists()


def test_the_best_cell_of_the_grid_is_what_the_studies_train_with(tmp_path):
    peak = {"sage_grpo": (3e-5, 0.5), "flow_grpo": (1e-4, 0.7), "dance_grpo": (3e-5, 0.25), "cps": (1e-4, 0.5)}
    without = {**peak, "sage_grpo": (1e-4, 0.25)}

    def gain(arm: Arm, seed: int) -> float:
        best = peak if arm.settings.get("use_grad_balancing", True) else without
        return float((arm.settings["learning_rate"], arm.settings["eta"]) == best[arm.settings["sde_type"]])

    published(tmp_path, "tuning", "--seeds", "101", "102", gain=gain)
    docs = tmp_path / "docs"
    for on, cells in ((True, peak), (False, without)):
        chosen = [arm.settings for arm in equalizer.arms(docs) if arm.settings["use_grad_balancing"] is on]
        assert {found["sde_type"]: (found["learning_rate"], found["eta"]) for found in chosen} == cells
    assert {(arm.settings["learning_rate"], arm.settings["eta"]) for arm in kl_strategies.arms(docs)} == {(3e-5, 0.5)}


def test_a_grid_that_is_not_whole_tunes_nothing(tmp_path):
    budget = budget_of(tmp_path, "--seeds", "101", "102")
    finish(tuning.arms()[:-1], budget, lambda arm, seed: arm.settings["learning_rate"])
    assert train_and_publish(tuning.STUDY, tuning.arms(), budget, tuned=False) == 0
    usual = tiny_config()
    expected = {"sde_type": "cps", "learning_rate": usual.optimizer.learning_rate, "eta": usual.rollout.eta}
    assert tuning.tuned_settings("cps", tmp_path / "docs") == expected
    assert "none until the grid is whole" in " ".join((tmp_path / "docs/claims.md").read_text().split())


def test_the_grid_is_measured_on_other_prompts_than_the_studies_base_included(tmp_path):
    budget = budget_of(tmp_path)
    bases = [base_run(arms, budget) for arms in (tuning.arms(), equalizer.arms(budget.docs))]
    assert "train.csv" in bases[0].settings["valid_video_csv"] and "valid_video_csv" not in bases[1].settings


def test_studies_share_the_runs_they_have_in_common(tmp_path):
    budget = budget_of(tmp_path)
    folders = [
        {run_of(arm, 1, budget).folder for arm in arms}
        for arms in (equalizer.arms(budget.docs), results_table.arms(budget.docs))
    ]
    assert len(folders[0] & folders[1]) == 4
    assert set(reward_settings.LABELS.values()) <= {arm.label for arm in results_table.arms(budget.docs)}


def test_all_arms_of_the_kl_study_sample_as_many_videos(tmp_path):
    budget = budget_of(tmp_path)
    for arm in kl_strategies.arms(budget.docs):
        updates = run_of(arm, 1, budget).settings["max_steps"]
        assert updates / arm.settings["updates_per_rollout"] == budget.rounds


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 24])
def test_every_run_is_measured_after_its_last_update(tmp_path, rounds):
    budget = budget_of(tmp_path, "--rounds", str(rounds))
    for updates in (1, 2):
        settings = run_of(Arm("a", {"updates_per_rollout": updates}), 1, budget).settings
        assert settings["max_steps"] % settings["validation_interval"] == 0
        assert settings["validation_interval"] % updates == 0


def test_another_setting_is_another_run(tmp_path):
    budget = budget_of(tmp_path)
    folders = {run_of(Arm("a", {"eta": eta}), seed, budget).folder for eta in (0.4, 0.5) for seed in (1, 2)}
    assert len(folders) == 4
    assert run_of(Arm("b", {"eta": 0.5}), 1, budget).folder in folders


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
                scores = [row | dict.fromkeys(guard.TRUTH, each) for row, each in zip(rows, drawn, strict=True)]
                path.write_text("".join(json.dumps(row) + "\n" for row in scores))


def test_a_guard_that_sees_the_planted_flaw_in_time_is_published_as_such(tmp_path, monkeypatch):
    """In hackable runs the proxy rises and the truth falls by the same steps; honest runs move by chance."""
    budget, arms = budget_of(tmp_path, "--rounds", "10"), guard.arms()
    budget.looks = guard.LOOKS
    monkeypatch.chdir(DOCS.parent)
    for arm in arms:
        check_config(load_config(run_of(arm, 1, budget).command()[2:]), 1)
    write_looks(arms, budget, lambda arm, time: (5 * time, -5 * time) if arm.label == "hackable" else (0.0, 0.0))
    assert train_and_publish(guard.STUDY, arms, budget, more=guard.watched) == 0
    path = tmp_path / "docs/claims/guard.json"
    assert verdicts(path) == [OPEN, HOLDS, OPEN]  # five of five and none of five runs are too few
    hacked = read_found(path)["arms"]["hackable"]["runs"].values()
    assert all(run["best"] < run["alarm"] <= 10 and run["kept"] > run["truth"][-1] for run in hacked)
    assert not any(run["alarm"] for run in read_found(path)["arms"]["honest"]["runs"].values())


def test_a_proxy_that_is_over_optimised_is_published_with_what_each_kl_keeps(tmp_path, monkeypatch):
    """Without a KL the truth rises and falls again; anchors hold back half of it and of the proxy, and dual all."""
    budget, arms = budget_of(tmp_path, "--rounds", "10"), over_optimization.arms()
    budget.looks = 5
    monkeypatch.chdir(DOCS.parent)
    for arm in arms:
        check_config(load_config(run_of(arm, 1, budget).command()[2:]), 1)

    def means(arm, time):
        hacked = {"none": 20.0, "fixed": 10.0, "moving": 10.0, "dual": 0.0}[arm.label.split(",")[0]]
        return (1 + hacked) * time, 5 * min(time, 0.4) - hacked * max(0.0, time - 0.4)

    write_looks(arms, budget, means)
    assert over_optimization.publish(arms, budget) == 0
    path = tmp_path / "docs/claims/over_optimization.json"
    assert verdicts(path) == [HOLDS] * 7
    assert "at update 8 " in (tmp_path / "docs/claims.md").read_text()  # two fifths of 20 updates
    assert path.with_suffix(".png").stat().st_size < 150_000
