"""What is said of a reward that may be exploited: by the guard with its judge, and by the watch over each run."""

import json
import math
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyvideo.checkpoint.train_state import BEST, checkpoints_of, latest_checkpoint, named_checkpoint
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.training import guard as guards
from hyvideo.training.guard import HALF, ROLLBACK_RATE, Look, RewardGuard, RewardWatch
from hyvideo.training.run import Run
from scripts.reports.run_record import read_run
from tests.support.equal_runs import assert_identical, rows_of, tensors_of
from tests.support.ranks import run_on_ranks
from tests.support.rewards import BRIGHTNESS, GUARDED, Brightness
from tests.support.run_folders import change_rows, write_run
from tests.support.training import PROMPTS, arguments, training_of, weights_of, write_prompts


def looks(rng: np.random.Generator, count: int, reward: float, judge: float, videos: int = 32) -> list[Look]:
    """Validations whose scores move by `reward` and `judge` per look, and by chance of each video."""
    steps = rng.normal(size=(2, count, videos)) * 0.3 + np.array([reward, judge])[:, None, None]
    levels = steps.cumsum(1) + rng.normal(size=(2, 1, videos))
    return [Look(10 * k, "same", *levels[:, k].tolist()) for k in range(count)]


def first_alarm(guard: RewardGuard, seen: list[Look]) -> int | None:
    return next((k for k, look in enumerate(seen) if guard.observe(look)), None)


def test_over_many_looks_few_honest_runs_are_stopped():
    rng, runs = np.random.default_rng(0), 150
    alarms = sum(first_alarm(RewardGuard("stop"), looks(rng, 25, 0.05, 0.0)) is not None for _ in range(runs))
    assert alarms <= 0.05 * runs


def test_a_judge_that_falls_while_the_reward_rises_is_seen_within_a_few_looks_and_an_honest_fall_is_none():
    rng = np.random.default_rng(1)
    delays = [first_alarm(RewardGuard("stop"), looks(rng, 20, 0.1, -0.15)) for _ in range(20)]
    assert all(delay is not None and 1 <= delay <= 12 for delay in delays)
    assert first_alarm(RewardGuard("stop"), looks(rng, 20, -0.1, -0.15)) is None  # no hacking: both fall


def test_a_report_finds_its_alarm_among_the_warnings(tmp_path: Path):
    guard, seen = RewardGuard("stop"), looks(np.random.default_rng(1), 20, 0.1, -0.15)
    alarm = next(filter(None, map(guard.observe, seen))).message
    run = write_run(tmp_path / "run", num_updates=2)
    (run / "console.log").write_text(f"2026-01-01 10:00:00 WARNING: {alarm}\n2026-01-01 10:00:00 WARNING: slow\n")
    assert read_run(run).alarms == {"May exploit its reward": alarm}


GOOD, BAD = [1.0, 1.1, 0.9, 1.0], [0.0, 0.1, -0.1, 0.02]


def test_failed_scores_and_other_videos_are_not_compared():
    guard, nan = RewardGuard("warn"), math.nan
    guard.observe(Look(0, "a", BAD, GOOD))
    assert guard.observe(Look(1, "b", GOOD, BAD)) is None  # of other videos
    guard = RewardGuard("warn")
    guard.observe(Look(0, "a", BAD, GOOD))
    assert guard.observe(Look(1, "a", GOOD, [nan, nan, nan, 0.0])) is None  # one pair tells nothing
    assert re.search(r"1\.7e-03 is enough at look 3\).*step_0\.", guard.observe(Look(2, "a", GOOD, BAD)).message)


def test_after_a_rollback_the_next_alarm_stops():
    guard = RewardGuard("rollback")
    guard.observe(Look(0, "a", BAD, GOOD))
    assert guard.observe(Look(1, "a", GOOD, BAD)).action == "rollback"
    guard.rolled_back = True
    assert guard.observe(Look(2, "a", GOOD, BAD)).action == "stop"


def test_its_state_survives_as_json():
    guard = RewardGuard("rollback", looks(np.random.default_rng(2), 3, 0, 0), rolled_back=True)
    guard.looks.append(Look(99, "same", [math.nan, 1 / 3], [2 / 3, math.nan]))
    other = RewardGuard("rollback")
    other.load(json.loads(json.dumps(guard.facts())))
    assert repr(other) == repr(guard)


@pytest.fixture
def guarded(no_encoding: None, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Train for brightness; the judge is darkness, the planted flaw whose truth is exact, or `sign` +1, brightness."""
    monkeypatch.setattr(guards, "ALPHA", 0.9)
    prompts = write_prompts(tmp_path / "prompts.csv", [f"{prompt} {n}" for n in range(2) for prompt in PROMPTS])

    def make(name: str, sign: int = -1, **settings: object) -> Run:
        judge = {"models": {BRIGHTNESS: {"sub_reward": {"brightness": float(sign)}}}}
        planted = {"reward_model": BRIGHTNESS, "reward_weights": '{"brightness": 1}', "reward_guard": json.dumps(judge)}
        settings = GUARDED | planted | {"max_steps": 8} | settings
        return training_of(arguments(tiny_root, prompts, tmp_path / name, **settings))

    return make


def test_a_planted_flaw_stops_the_run_which_names_the_best_checkpoint_and_an_honest_judge_does_not(guarded):
    hacked = guarded("hacked", reward_guard_action="stop")
    assert hacked.train() == "reward_guard"
    rows, folder = rows_of(hacked.folder.path), hacked.folder.checkpoints
    assert 1 <= len(rows) < 8 and rows[-1]["valid/judge"] == pytest.approx(-rows[-1]["valid/reward"])
    judged = [rows_of_judge(hacked), *(row["valid/judge"] for row in rows)]
    best = named_checkpoint(folder / BEST)
    assert best.name == f"step_{judged.index(max(judged))}" and latest_checkpoint(folder).name == f"step_{len(rows)}"
    told = (hacked.folder.path / "console.log").read_text()
    assert "the judge fell by" in told and f"use {folder / BEST}, which is {best.name}" in told

    honest = guarded("honest", sign=1, reward_guard_action="stop", max_steps=4)
    assert honest.train() is None and len(rows_of(honest.folder.path)) == 4


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_a_spread_that_falls_below_its_share_of_the_base_stops_the_run_or_warns_without_any_judge(guarded, action):
    settings = {"reward_guard": None, "drift_guard": ["border=0.5", "motion=0.1"], "reward_guard_action": action}
    training = guarded("alike", **settings, max_steps=1)
    assert training.train() is None  # in one update nothing falls so far
    base, borders = training.folder.samples / "step_0" / "scores.jsonl", cycle((0.0, 0.9))
    # as if the base's borders had differed far more
    change_rows(base, lambda row: row | {"looks": row["looks"] | {"border": next(borders)}})
    training.journal.metrics.close()
    training = guarded("alike", **settings, max_steps=3, resume_from_checkpoint="latest")
    assert training.train() == (None if action == "warn" else "drift_guard")
    assert len(rows_of(training.folder.path)) == (3 if action == "warn" else 2)
    record = read_run(training.folder.path)
    assert re.search(r"over 8 prompts fell to 0\.\d\d for border ", record.alarms["Videos become alike"])
    assert not any("motion" in warning for warning in record.warnings)
    if action == "stop":
        (without,) = re.findall(r"--drift_guard (.*)", (training.folder.path / "console.log").read_text())
        settings |= {"drift_guard": without}
    else:
        base.write_text("no row\n")  # damaged while it trains, which goes on
    assert guarded("alike", **settings, max_steps=4, resume_from_checkpoint="latest").train() is None
    told = (training.folder.path / "console.log").read_text()
    assert ("drift_guard saw nothing" in told) == (action == "warn")


def test_a_guard_that_only_warns_changes_nothing_but_names_the_best_checkpoint(guarded):
    training = guarded("warned", reward_guard_action="warn", max_steps=5)
    assert training.train() is None
    rows, folder = rows_of(training.folder.path), training.folder.checkpoints
    told = (training.folder.path / "console.log").read_text()
    assert "to 4 the trained reward rose" in told and "the judge fell by" in told
    judged = [rows_of_judge(training), *(row["valid/judge"] for row in rows)]
    assert named_checkpoint(folder / BEST).name == f"step_{judged.index(max(judged))}"
    unguarded = guarded("unguarded", reward_guard=None, validation_interval=0, max_steps=5)
    unguarded.train()
    for row, plain in zip(rows, rows_of(unguarded.folder.path), strict=True):
        assert {name: row[name] for name in plain} == plain


class Unloadable(Brightness):
    """A reward that must not be built, because its run is refused before."""

    def __init__(self, context: RewardContext) -> None:
        raise AssertionError("built")


def judged_by(name: str, metric: str, **options: object) -> str:
    return json.dumps({"models": {name: {"sub_reward": {metric: 1.0}, "options": options}}})


COMPARED = "would compare 2 validation videos that its judge can judge .not 'a red circle"


@pytest.mark.parametrize(
    ("judge", "settings", "message"),
    [
        ("{}", {}, "reward_guard: expected"),
        (judged_by("moving_shapes", "XQ"), {}, "reward_guard: moving_shapes has no metric"),
        (judged_by("moving_shapes", "MQ", x=1), {}, "reward_guard: moving_shapes cannot use its options {'x': 1}"),
        (judged_by("moving_shapes", "MQ"), {"validation_interval": 0}, "set an interval"),
        (judged_by("moving_shapes", "MQ"), {"validation_num_videos": 4}, "at least 8"),
        (judged_by("pickscore", "PickScore"), {}, "reward_guard: no reward named"),
        (judged_by("foo:Bar", "x"), {}, "reward_guard: 'foo:Bar' cannot be imported"),
        (judged_by("pick_score", "PickScore"), {}, "reward_guard: pick_score .*required argument: 'checkpoint'"),
        (judged_by("text_rendering", "TEXT"), {"reward_model": BRIGHTNESS}, COMPARED),
    ],
)
def test_a_guard_that_could_not_judge_is_refused(guarded, judge: str, settings: dict[str, Any], message: str):
    settings = {"reward_model": f"{__name__}:{Unloadable.__name__}"} | settings
    with pytest.raises(ValueError, match=message):
        guarded("refused", reward_guard=judge, **settings)


def test_a_best_checkpoint_that_only_the_continued_run_has_is_not_promised(guarded):
    settings = {"reward_guard_action": "rollback", "save_interval": 1, "keep_last": 9, "learning_rate": 1e-2}
    first = guarded("first", **settings, max_steps=3)
    assert first.train() is None
    best = named_checkpoint(first.folder.checkpoints / BEST).name
    second = guarded("second", **settings, resume_from_checkpoint=first.folder.checkpoints / "step_3")
    assert second.train() == "reward_guard"
    folder, told = second.folder, (second.folder.path / "console.log").read_text()
    assert f"But {best} is not in this run's folder" in told and "use " not in told.split("stopped by reward_guard")[1]
    assert not (folder.checkpoints / BEST).exists()


def test_a_run_that_goes_back_names_no_best_checkpoint_of_the_future_that_it_abandons(guarded):
    settings = {"validation_interval": 2, "save_interval": 1, "keep_last": 9, "max_steps": 2}
    first = guarded("run", 1, **settings)
    first.train()
    checkpoints = first.folder.checkpoints
    assert named_checkpoint(checkpoints / BEST).name == "step_2"
    shutil.rmtree(checkpoints / "step_0")  # the best one until step 2, which may be pruned since
    again = guarded("run", 1, **settings, resume_from_checkpoint=checkpoints / "step_1")
    with again.session():
        assert not (checkpoints / BEST).exists()


def rows_of_judge(training: Run) -> float:
    return training.state.guard.looks[0].mean


def test_a_rollback_goes_on_from_the_best_at_a_lower_rate(guarded):
    settings = {"reward_guard_action": "rollback", "save_interval": 1, "keep_last": 1, "max_steps": 6}
    whole = guarded("whole", **settings)
    state, restored = whole.state, []
    put_back = state.put_policy_back

    def watched(checkpoint: Path) -> None:
        put_back(checkpoint)
        weights, stored = weights_of(whole), tensors_of(checkpoint)
        assert all(torch.equal(weights[name], stored[f"policy.{name}"]) for name in weights)
        restored.append(len(state.guard.looks) - 1)

    state.put_policy_back = watched
    whole.train()
    (at,) = restored
    folder, rows = whole.folder, rows_of(whole.folder.path)
    rates = [row["lr"] for row in rows]
    assert rates == pytest.approx([5e-3] * at + [5e-3 * ROLLBACK_RATE] * (len(rates) - at)) and 0 < at < len(rates)
    assert named_checkpoint(folder.checkpoints / BEST) in checkpoints_of(folder.checkpoints)


def train(argv: list[str], killed_after: int | None = None) -> None:
    """Train a run; every rank is killed when it has made as many updates, before it saves the last one."""
    guards.ALPHA = 0.9  # in a process of its own
    training = training_of(argv)
    run, log = training, training.log

    def log_or_die(*args: object) -> None:
        if run.state.step == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        log(*args)

    run.log = log_or_die
    training.train()


def test_a_guarded_run_that_rolls_back_is_killed_and_resumes_bit_for_bit(tmp_path: Path, root_of_four_heads):
    prompts = write_prompts(tmp_path / "prompts.csv", [f"{prompt} {n}" for n in range(2) for prompt in PROMPTS])
    bright = {"sub_reward": {"brightness": 1.0}}
    settings = GUARDED | {
        "reward_config": json.dumps({"models": {BRIGHTNESS: bright, "moving_shapes": {"sub_reward": {"MQ": 0.1}}}}),
        "reward_guard": json.dumps({"models": {BRIGHTNESS: {"sub_reward": {"brightness": -1.0}}}}),
        **{"reward_guard_action": "rollback", "batch_size": 2, "save_interval": 1, "keep_last": 2, "max_steps": 5},
    }
    whole, killed, resumed = (
        arguments(root_of_four_heads, prompts, tmp_path / name, **settings, **changes)
        for name, changes in (("whole", {}), ("parts", {}), ("parts", {"resume_from_checkpoint": "latest"}))
    )
    run_on_ranks(2, train, whole)
    with pytest.raises(AssertionError, match="rank 1: ended without a result"):
        run_on_ranks(2, train, killed, 4)
    assert len(rows_of(tmp_path / "parts")) == 3
    run_on_ranks(2, train, resumed)
    assert_identical(tmp_path / "parts", tmp_path / "whole")
    rows = rows_of(tmp_path / "whole")
    assert len({row["lr"] for row in rows}) == 2, "no rollback"
    best = [named_checkpoint(tmp_path / name / "checkpoints" / BEST).name for name in ("parts", "whole")]
    assert best[0] == best[1]


ROUNDS = 2 * HALF


def rows(reward: float, valid: float, diversity: float) -> Iterator[dict[str, float]]:
    """Rounds in which each metric moves by so much in all, with noise on the reward; every tenth is validated."""
    noise = random.Random(0)
    for number in range(ROUNDS):
        share = number / (ROUNDS - 1)
        row = {"reward/mean": reward * share + noise.gauss(0, 0.2), "rollout/diversity": 0.1 + diversity * share}
        yield row | ({"valid/reward": 0.5 + valid * share} if number % 10 == 9 else {})


def warnings(**moves: float) -> list[str]:
    watch = RewardWatch()
    return [warning for row in rows(**moves) if (warning := watch.observe(row))]


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        ({"reward": 0.3, "valid": -0.5, "diversity": 0.0}, r"but valid/reward fell from \+0\.3"),
        ({"reward": 1.0, "valid": 0.2, "diversity": -0.08}, r"but rollout/diversity fell from 0\.08\d+ to 0\.03\d+:"),
        ({"reward": 1.0, "valid": -0.5, "diversity": -0.05}, "valid/reward fell .* and rollout/diversity fell"),
    ],
)
def test_a_rise_at_the_cost_of_something_is_told_once_with_its_numbers(moves: dict[str, float], said: str):
    (warning,) = warnings(**moves)
    assert "reward/mean rose from" in warning and re.search(said, warning)


def test_an_honest_rise_one_within_the_noise_and_a_fall_are_not():
    for reward, valid, diversity in ((1.0, 0.5, -0.03), (0.2, -0.5, -0.08), (-1.0, -0.5, -0.08)):
        assert warnings(reward=reward, valid=valid, diversity=diversity) == []


def test_a_validation_of_the_rounds_is_compared_with_the_one_before_them():
    watch, noise = RewardWatch(), random.Random(0)
    said = []
    for number in range(1, 201):
        row = {"reward/mean": number / 10 + noise.gauss(0, 0.2), "rollout/diversity": 0.1}
        valid = {100: {"valid/reward": 0.5}, 200: {"valid/reward": 0.1}}.get(number, {})
        if warning := watch.observe(row | valid):
            said.append((number, warning))
    ((number, warning),) = said
    assert number == 200 and "valid/reward fell from +0.5000 to +0.1000" in warning
