"""The loop: what it saves and when, what it logs, and how it stops."""

import atexit
import gc
import math
import re
import signal
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hyvideo.algorithms.optimizer import NonFiniteUpdateError
from hyvideo.checkpoint.train_state import SaveError, checkpoints_of, latest_checkpoint
from hyvideo.config.outside import loading
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.models.reward_models.rewards import Scores
from hyvideo.models.transformer import transformer_flops
from hyvideo.observability.metrics import read_metrics
from hyvideo.training.run import Performance, Run, garbage_collected_on_request
from post_train import report
from tests.support.equal_runs import assert_same, rows_of
from tests.support.rewards import scoring_with
from tests.support.training import arguments, collect_round, training_of, weights_of


def saved_steps(training: Run) -> list[str]:
    return [path.name for path in checkpoints_of(training.folder.checkpoints)]


def metrics_of(training: Run) -> list[dict[str, float]]:
    """With the times, and with NaN for what was not finite."""
    return read_metrics(training.folder.path / "metrics.jsonl")


def test_checkpoints_fall_at_the_end_of_the_round_that_crosses_the_interval_and_asked_ones_stay(trained):
    training = trained(updates_per_rollout=2, max_steps=9, save_interval=3, keep_last=1, keep_every=4)
    assert saved_steps(training) == ["step_4", "step_10"]  # the round that reaches max_steps is made whole
    assert latest_checkpoint(training.folder.checkpoints).name == "step_10"
    assert gc.isenabled()


def test_during_a_run_what_was_there_before_is_out_of_every_garbage_collection(monkeypatch):
    called = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(called.append, name))
    with garbage_collected_on_request():
        assert called == ["freeze"] and not gc.isenabled()
    assert called == ["freeze", "unfreeze"] and gc.isenabled()


def test_garbage_is_collected_when_a_run_begins_and_between_rounds(make_training, monkeypatch):
    training, at, collect = make_training(max_steps=3), [], gc.collect
    monkeypatch.setattr(gc, "collect", lambda: at.append(training.state.step) or collect())
    training.train()
    assert at == [0, 1, 2]


def test_imports_are_never_looked_through_for_garbage_and_say_nothing_where_nobody_reads_it(capsys, monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    with pytest.raises(ImportError), loading("post_train.py"):
        assert not gc.isenabled()
        loaded = [[]]
        raise ImportError
    assert gc.isenabled() and at_exit == [gc.freeze] and capsys.readouterr().err == ""
    assert not any(known is loaded for known in gc.get_objects())


def test_every_update_is_a_row_and_a_rounds_replay_error_is_that_before_its_first_update(trained):
    training = trained(updates_per_rollout=2, max_steps=4)
    rows = metrics_of(training)
    assert [(row["step"], row["round"]) for row in rows] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert {row["ratio/max_deviation"] for row in rows} == {0.0}
    assert rows[1]["kl/velocity"] != 0  # although the second update's own ratios are not 1
    assert rows[0]["kl/position"] == 0 < rows[1]["kl/position"]
    assert 0 < rows[0]["rollout/least_diversity"] < rows[0]["rollout/diversity"] < 0.5
    assert re.findall(r" step (\d)/4", (training.folder.path / "console.log").read_text()) == ["2", "4"]


def test_the_gap_to_the_ode_is_measured_where_a_validation_interval_begins(trained):
    """A sampler without noise has none; the default's leaves noise in the latents, and nothing else changes."""
    flags = {"max_steps": 4, "validation_interval": 2, "validation_num_videos": 2}
    training, quiet = trained(**flags), trained(**flags, eta=1e-9, kl_weight=0)
    rows = metrics_of(training)
    assert [row["step"] for row in rows if "rollout/ode_gap" in row] == [1, 3]
    assert all(row["rollout/ode_gap"] != 0 for row in rows[::2])
    assert [row.get("rollout/ode_gap") for row in metrics_of(quiet)] == [pytest.approx(0, abs=1e-4), None] * 2
    without = trained(**flags | {"validation_interval": 0})
    for name in ("reward/mean", "loss/total", "grad_norm"):
        assert [row[name] for row in metrics_of(without)] == [row[name] for row in rows]


def test_the_coefficient_and_rate_of_a_row_are_those_its_update_used(trained):
    """The coefficient warms up for two updates, then falls: the divergence is above a target as small as this."""
    kl = {"kl_weight": 0.01, "kl_min_coef": 0.001, "kl_warmup_updates": 2, "kl_target": 1e-9}
    training = trained(max_steps=4, updates_per_rollout=2, lr_warmup_steps=2, learning_rate=1e-4, **kl)
    rows = metrics_of(training)
    assert [row["lr"] for row in rows] == pytest.approx([0.00005, 0.0001, 0.0001, 0.0001])
    assert [row["kl/coef"] for row in rows] == pytest.approx([0.001, 0.0055, 0.01, 0.009])
    observed = [row["kl/position"] + 0.1 * row["kl/velocity"] for row in rows]
    assert training.algorithm.controller.state_dict()["recent"] == pytest.approx(observed)
    assert rows[1]["kl/velocity"] != 0 != rows[1]["loss/policy"]
    for row, kl in zip(rows, observed, strict=True):
        assert row["loss/total"] == pytest.approx(row["loss/policy"] + row["kl/coef"] * kl, abs=1e-7)


def test_the_share_of_the_kl_term_in_the_gradient_is_logged_and_grows_with_its_weight(trained):
    shares = {}
    for kl_weight in (0.0, 0.01, 0.1):
        training = trained(max_steps=2, updates_per_rollout=1, kl_weight=kl_weight, kl_schedule="fixed")
        shares[kl_weight] = [row.get("kl/gradient_share") for row in metrics_of(training)]
    assert shares[0.0] == [None, None]
    assert shares[0.01][0] == shares[0.1][0] == 0  # the policy still equals its anchor
    assert 0 < 10 * shares[0.01][1] == pytest.approx(shares[0.1][1], rel=1e-3)


def test_a_signal_ends_the_run_after_its_round_with_a_checkpoint(make_training, monkeypatch):
    training = make_training(updates_per_rollout=2, max_steps=100)
    log = training.journal.metrics.log

    def interrupt(step: int, values: dict[str, float]) -> None:
        log(step, values)
        if step == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(training.journal.metrics, "log", interrupt)
    training.train()
    assert saved_steps(training) == ["step_4"]
    console = (training.folder.path / "console.log").read_text()
    assert f"SIGTERM: saved and stopped after step 4. Continue with --output_dir {training.folder.path}" in console


def interrupt_rollout(training: Run, monkeypatch, number: signal.Signals, step: int) -> None:
    encode = training.policy.pipeline.encode_prompts

    def interrupted(*args: object) -> object:
        if training.state.step == step:
            signal.raise_signal(number)
        return encode(*args)

    monkeypatch.setattr(training.policy.pipeline, "encode_prompts", interrupted)


def test_a_preemption_before_the_first_update_gives_the_round_up_and_it_is_made_again(make_training, monkeypatch):
    whole = make_training(max_steps=4)
    assert whole.train() is None
    training = make_training(max_steps=4)
    interrupt_rollout(training, monkeypatch, signal.SIGTERM, step=2)
    assert training.train() == "SIGTERM"
    assert saved_steps(training) == ["step_2"] and len(metrics_of(training)) == 2
    monkeypatch.undo()
    training.state.load(training.folder.checkpoints / "step_2")
    assert training.train() is None and rows_of(training.folder.path) == rows_of(whole.folder.path)


@pytest.mark.parametrize(("number", "step", "saved"), [(signal.SIGINT, 1, ["step_2"]), (signal.SIGUSR1, 0, [])])
def test_ctrl_c_lets_the_round_end_and_an_early_preemption_saves_none(make_training, monkeypatch, number, step, saved):
    training = make_training(max_steps=9)
    interrupt_rollout(training, monkeypatch, number, step)
    assert training.train() == number.name and saved_steps(training) == saved


def infinite_gradients(training: Run, monkeypatch, steps: range) -> None:
    loss = training.algorithm._loss

    def poisoned(*args: object) -> object:
        total, numbers = loss(*args)
        if training.state.step not in steps:
            return total, numbers
        return total * math.inf, numbers | {"loss/total": total * math.inf}

    monkeypatch.setattr(training.algorithm, "_loss", poisoned)


def test_updates_that_are_not_finite_are_skipped_where_that_is_allowed(make_training, monkeypatch):
    training = make_training(max_steps=4, max_skipped_updates=2)
    infinite_gradients(training, monkeypatch, range(1, 3))
    training.train()
    rows = metrics_of(training)
    assert [row["update/skipped"] for row in rows] == [0, 1, 1, 0]
    assert all(math.isfinite(row["grad_norm"]) != bool(row["update/skipped"]) for row in rows)
    assert all(torch.isfinite(p).all() for p in trainable_parameters(training.policy.transformer).values())
    assert "Update 3 skipped, 2 in a row: loss" in (training.folder.path / "console.log").read_text()


def test_skipped_updates_move_no_weight_and_no_controller_and_too_many_in_a_row_end_a_run(make_training, monkeypatch):
    training = make_training(max_steps=9, max_skipped_updates=2)
    before = weights_of(training)
    controller = training.algorithm.controller.state_dict()
    infinite_gradients(training, monkeypatch, range(9))
    said = r"Update 3 after 2 skipped in a row: .*not finite.*Last good checkpoint: none was saved yet"
    with pytest.raises(NonFiniteUpdateError, match=said):
        training.train()
    assert len(metrics_of(training)) == 2
    assert_same(weights_of(training), before)
    assert training.algorithm.controller.state_dict() == controller


def test_a_policy_that_is_lost_is_not_saved_and_deletes_no_checkpoint(trained):
    training = trained(max_steps=2)
    with torch.no_grad():
        trainable_parameters(training.policy.transformer)["proj_out.bias"][0] = math.nan
    with pytest.raises(SaveError, match=r"proj_out\.bias\. Last good checkpoint: .*step_2"):
        training.state.save(training.folder.checkpoints, keep_last=1)
    training.state.load(training.folder.checkpoints / "step_2")


@pytest.mark.parametrize("error", [RewardFailureError, RuntimeError, OSError])
def test_a_reward_that_fails_costs_no_checkpoint_that_is_being_written(make_training, error: type[Exception]):
    training = make_training(max_steps=2, save_interval=1, async_save=True)
    score = training.reward.__call__

    def fail_in_the_second_round(*videos_and_texts: Any) -> Scores:
        if training.state.step:
            raise error("the server is gone")
        return score(*videos_and_texts)

    training.reward = scoring_with(training.reward, fail_in_the_second_round)
    with pytest.raises(RewardFailureError):
        training.train()
    assert latest_checkpoint(training.folder.checkpoints).name == "step_1"


def test_going_back_to_a_checkpoint_makes_it_the_latest(tiny_root: Path, prompts_csv: Path, tmp_path: Path):
    argv = arguments(tiny_root, prompts_csv, tmp_path / "run", max_steps=2, save_interval=1)
    first = training_of(argv)
    first.train()
    older = first.folder.checkpoints / "step_1"
    training_of([*argv, "--resume_from_checkpoint", str(older)])  # and is killed before its next save
    assert latest_checkpoint(first.folder.checkpoints).name == "step_1"


def test_a_failed_score_is_counted_and_left_out(make_training, tmp_path: Path):
    csv = tmp_path / "prompts.csv"
    csv.write_text("prompt\na red circle moves slowly to the left\nsomething the reward cannot read\n")
    training, same = (make_training(train_video_csv=csv, max_steps=1) for _ in range(2))
    training.train()
    (row,) = metrics_of(training)
    assert row["reward/failed"] == 2
    warning = "WARNING: 2 videos of the round that ended with update 1 could not be scored and are left out"
    assert warning in (training.folder.path / "console.log").read_text()
    scores = collect_round(same).scores
    good = [total for total in scores.total.tolist() if not math.isnan(total)]
    assert row["reward/mean"] == pytest.approx(statistics.fmean(good))
    assert row["reward/std"] == pytest.approx(statistics.pstdev(good))
    assert row["reward/VQ"] == pytest.approx(statistics.fmean(scores.metrics["VQ"][~scores.total.isnan()].tolist()))
    assert row["grad_norm"] > 0


def test_the_report_is_refreshed_at_every_save_and_knows_the_last_update(make_training):
    training = make_training(max_steps=4, save_interval=2, validation_interval=2, validate_at_step0=True)
    written = []

    def refresh(folder: Path) -> None:
        report(folder)
        written.append(training.state.step)

    training.journal.report = refresh
    training.train()
    assert written == [2, 4]
    text = (training.folder.path / "report.html").read_text()
    assert "4 of 4 updates, finished" in text
    assert "Trust region" in text and 'src="samples/step_4/001.mp4"' in text


def test_a_report_that_cannot_be_written_stops_no_training(make_training):
    training = make_training(max_steps=1)
    training.journal.report = report
    (training.folder.path / "report.html").mkdir(parents=True)
    training.train()
    assert saved_steps(training) == ["step_1"]
    assert "WARNING: report.html was not written" in (training.folder.path / "console.log").read_text()


def test_every_trained_step_logs_its_gradient_and_equalized_ones_are_alike(make_training, trained):
    pulls = {}
    for use_grad_balancing in (True, False):
        training = trained(max_steps=1, use_grad_balancing=use_grad_balancing)
        (row,) = metrics_of(training)
        pulls[use_grad_balancing] = [row[f"velocity_grad/step_{step:02d}"] for step in range(4)]
    scales = make_training(max_steps=1).algorithm.scales.tolist()
    before = [pull / scale for pull, scale in zip(pulls[True], scales, strict=True)]
    assert before == pytest.approx(pulls[False], rel=1e-3)
    assert max(pulls[True]) / min(pulls[True]) < 1.2 < 3 < max(before) / min(before)


SECONDS = {"time/rollout": 2.0, "time/reward": 1.0, "time/anchor": 1.0, "time/update": 4.0}


@pytest.mark.parametrize(("cfg_scale", "use_lora"), [(1.0, False), (4.0, False), (1.0, True)])
def test_utilisation_counts_each_evaluation_of_valid_tokens(make_training, cfg_scale: float, use_lora: bool):
    training = make_training(cfg_scale=cfg_scale, use_lora=use_lora, updates_per_rollout=2)
    trajectory = collect_round(training)
    policy = training.policy
    performance = Performance(policy, training.config, training.mesh, peak_tflops=1e-3, updates_per_round=2)
    row = performance.row(trajectory, 8, SECONDS)

    config = policy.transformer.config
    conditions = [trajectory.conditioning] + ([policy.guidance.negative] if cfg_scale != 1.0 else [])
    texts = [(len(c.text[i]), len(c.glyph[i])) for c in conditions for i in range(len(c))]
    passes = [transformer_flops(config, num_video=8, num_text=text, num_glyph=glyph) for text, glyph in texts]
    per_video = [passes[prompt].total + sum(p.total for p in passes[2:]) for prompt in (0, 0, 1, 1)]
    linear = [passes[prompt].linear for prompt in (0, 0, 1, 1)]
    assert row["perf/mfu_rollout"] == pytest.approx(4 * sum(per_video) / 2.0 / 1e9)
    trained = 2 * (3 * sum(per_video) - (sum(linear) if use_lora else 0))  # each update has two steps of each video
    assert row["perf/mfu_update"] == pytest.approx(trained / 4.0 / 1e9)
    assert row["perf/videos_per_gpu_hour"] == pytest.approx(3600 * 4 / 8.0)

    later = performance.row(trajectory, 8, SECONDS | {"time/rollout": 0.0, "time/reward": 0.0})
    assert later["perf/mfu_rollout"] == row["perf/mfu_rollout"]
    assert later["perf/videos_per_gpu_hour"] == pytest.approx(3600 * 4 / (8.0 + 5.0))
