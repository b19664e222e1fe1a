"""The loop: what it saves and when, what it logs, and how it stops."""

import json
import math
import signal
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hyvideo.checkpoint.train_state import SaveError, checkpoints_of, latest_checkpoint
from hyvideo.data.videos import video_length
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.models.reward_models.rewards import Scores
from hyvideo.observability.metrics import read_metrics
from hyvideo.training.trainer import Trainer
from hyvideo.training.update import NonFiniteUpdateError
from tests.support.equal_runs import rows_of
from tests.support.training import arguments, collect_round, trainer_of


def saved_steps(trainer: Trainer) -> list[str]:
    return [path.name for path in checkpoints_of(trainer.folder.checkpoints)]


def metrics_of(trainer: Trainer) -> list[dict[str, float]]:
    """With the times, and with NaN for what was not finite."""
    return read_metrics(trainer.folder.path / "metrics.jsonl")


def test_checkpoints_fall_at_the_end_of_the_round_that_crosses_the_interval(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(updates_per_rollout=2, max_steps=7, save_interval=3, keep_last=10)
    trainer.train()
    assert saved_steps(trainer) == ["step_4", "step_6", "step_7"]
    assert latest_checkpoint(trainer.folder.checkpoints).name == "step_7"


def test_a_round_cut_short_keeps_the_checkpoint_it_began_with(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(updates_per_rollout=2, max_steps=5, keep_last=1)
    trainer.train()
    assert saved_steps(trainer) == ["step_4", "step_5"]
    assert len(metrics_of(trainer)) == 5


def test_only_the_last_checkpoints_and_every_so_many_are_kept(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(max_steps=6, save_interval=1, keep_last=2, keep_every=3)
    trainer.train()
    assert saved_steps(trainer) == ["step_3", "step_5", "step_6"]


def test_every_update_is_a_row_and_a_rounds_replay_error_is_that_before_its_first_update(
    make_trainer: Callable[..., Trainer],
):
    trainer = make_trainer(updates_per_rollout=2, max_steps=4)
    trainer.train()
    rows = metrics_of(trainer)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["round"] for row in rows] == [0, 0, 1, 1]
    assert {row["ratio/max_deviation"] for row in rows} == {0.0}
    assert rows[1]["kl/velocity"] != 0  # although the second update's own ratios are not 1
    assert rows[0]["kl/position"] == 0
    assert rows[1]["kl/position"] > 0
    assert 0 < rows[0]["rollout/least_diversity"] < rows[0]["rollout/diversity"] < 0.5


def test_the_coefficient_and_rate_of_a_row_are_those_its_update_used(make_trainer: Callable[..., Trainer]):
    """The coefficient warms up for two updates, then falls: the divergence is above a target as small as this."""
    trainer = make_trainer(
        max_steps=4,
        updates_per_rollout=2,
        lr_warmup_steps=2,
        learning_rate=1e-4,
        kl_weight=0.01,
        kl_min_coef=0.001,
        kl_warmup_updates=2,
        kl_target=1e-9,
    )
    trainer.train()
    rows = metrics_of(trainer)
    assert [row["lr"] for row in rows] == pytest.approx([0.00005, 0.0001, 0.0001, 0.0001])
    assert [row["kl/coef"] for row in rows] == pytest.approx([0.001, 0.0055, 0.01, 0.009])
    observed = [row["kl/position"] + 0.1 * row["kl/velocity"] for row in rows]
    assert trainer.state.controller.state_dict()["recent"] == pytest.approx(observed)
    assert rows[1]["kl/velocity"] != 0 != rows[1]["loss/policy"]
    for row, kl in zip(rows, observed, strict=True):
        assert row["loss/total"] == pytest.approx(row["loss/policy"] + row["kl/coef"] * kl, abs=1e-7)


def test_a_signal_ends_the_run_after_its_round_with_a_checkpoint(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(updates_per_rollout=2, max_steps=100)
    log = trainer.metrics.log

    def interrupt(step: int, values: dict[str, float]) -> None:
        log(step, values)
        if step == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(trainer.metrics, "log", interrupt)
    trainer.train()
    assert saved_steps(trainer) == ["step_4"]
    console = (trainer.folder.path / "console.log").read_text()
    assert f"SIGTERM: saved and stopped after step 4. Continue with --output_dir {trainer.folder.path}" in console


def interrupt_rollout(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, step: int) -> None:
    """Send a signal while the round after `step` is being sampled."""
    encode = trainer.update.pipeline.encode_prompts

    def interrupted(*args: object) -> object:
        if trainer.state.step == step:
            signal.raise_signal(number)
        return encode(*args)

    monkeypatch.setattr(trainer.update.pipeline, "encode_prompts", interrupted)


def test_a_preemption_before_the_first_update_gives_the_round_up_and_it_is_made_again(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    whole = make_trainer(max_steps=4)
    assert whole.train() is None
    trainer = make_trainer(max_steps=4)
    interrupt_rollout(trainer, monkeypatch, signal.SIGTERM, step=2)
    assert trainer.train() == "SIGTERM"
    assert saved_steps(trainer) == ["step_2"]
    assert len(metrics_of(trainer)) == 2
    monkeypatch.undo()
    trainer.state.load(trainer.folder.checkpoints / "step_2")
    assert trainer.train() is None
    assert rows_of(trainer.folder.path) == rows_of(whole.folder.path)


def test_ctrl_c_in_the_rollout_lets_the_round_end(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(max_steps=9)
    interrupt_rollout(trainer, monkeypatch, signal.SIGINT, step=1)
    assert trainer.train() == "SIGINT"
    assert saved_steps(trainer) == ["step_2"]


def test_a_preemption_before_anything_was_made_saves_nothing(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(max_steps=9)
    interrupt_rollout(trainer, monkeypatch, signal.SIGUSR1, step=0)
    assert trainer.train() == "SIGUSR1"
    assert latest_checkpoint(trainer.folder.checkpoints) is None


def infinite_gradients(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """Make the gradients of some updates infinite."""
    loss = trainer.update._loss

    def poisoned(*args: object) -> object:
        made = loss(*args)
        return replace(made, total_loss=made.total_loss * math.inf) if trainer.state.step in steps else made

    monkeypatch.setattr(trainer.update, "_loss", poisoned)


def test_an_update_that_is_not_finite_is_skipped_where_that_is_allowed(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(max_steps=4, nonfinite_update="skip", max_skipped_updates=2)
    infinite_gradients(trainer, monkeypatch, range(1, 3))
    trainer.train()
    rows = metrics_of(trainer)
    assert [row["update/skipped"] for row in rows] == [0, 1, 1, 0]
    assert all(math.isfinite(row["grad_norm"]) != bool(row["update/skipped"]) for row in rows)
    assert all(torch.isfinite(p).all() for p in trainable_parameters(trainer.state.transformer).values())
    assert "Update 3 skipped, 2 in a row: loss" in (trainer.folder.path / "console.log").read_text()


def test_skipped_updates_move_neither_weights_nor_controller(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(max_steps=1, nonfinite_update="skip")
    before = {name: p.detach().clone() for name, p in trainable_parameters(trainer.state.transformer).items()}
    controller = trainer.state.controller.state_dict()
    infinite_gradients(trainer, monkeypatch, range(1))
    trainer.train()
    policy = trainable_parameters(trainer.state.transformer)
    assert all(torch.equal(policy[name], before[name]) for name in before)
    assert trainer.state.controller.state_dict() == controller


def test_too_many_skipped_updates_in_a_row_end_the_run(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(max_steps=9, nonfinite_update="skip", max_skipped_updates=2)
    infinite_gradients(trainer, monkeypatch, range(1, 9))
    with pytest.raises(NonFiniteUpdateError, match=r"Update 4 after 2 skipped in a row: .*not finite"):
        trainer.train()
    assert len(metrics_of(trainer)) == 3


def test_a_policy_that_is_lost_is_not_saved_and_deletes_no_checkpoint(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(max_steps=2)
    trainer.train()
    with torch.no_grad():
        trainable_parameters(trainer.state.transformer)["proj_out.bias"][0] = math.nan
    with pytest.raises(SaveError, match=r"proj_out\.bias\. Last good checkpoint: .*step_2"):
        trainer.state.save(trainer.folder.checkpoints, keep_last=1)
    trainer.state.load(trainer.folder.checkpoints / "step_2")


def test_a_loss_that_is_not_finite_changes_no_weight_and_names_the_last_good_checkpoint(
    make_trainer: Callable[..., Trainer],
):
    trainer = make_trainer(max_steps=2, save_interval=1)
    trainer.train()
    good = trainer.folder.checkpoints / "step_2"
    trainer.config.run.max_steps = 5
    policy = trainable_parameters(trainer.state.transformer)
    saved = {name: p.detach().clone() for name, p in policy.items()}
    with torch.no_grad():
        policy["proj_out.bias"].fill_(float("inf"))
    with pytest.raises(NonFiniteUpdateError, match=rf"Update 3: .*not finite.*Last good checkpoint: {good}\."):
        trainer.train()
    del saved["proj_out.bias"]
    assert all(torch.equal(policy[name], saved[name]) for name in saved)
    assert trainer.state.step == 2
    assert len(metrics_of(trainer)) == 2
    trainer.state.load(good)
    assert torch.isfinite(policy["proj_out.bias"]).all()


def test_before_the_first_checkpoint_there_is_none_to_name(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer()
    with torch.no_grad():
        trainable_parameters(trainer.state.transformer)["proj_out.bias"].fill_(float("nan"))
    with pytest.raises(NonFiniteUpdateError, match="Last good checkpoint: none was saved yet"):
        trainer.train()


@pytest.mark.parametrize("error", [RewardFailureError, RuntimeError, OSError])
def test_a_reward_that_fails_costs_no_checkpoint_that_is_being_written(
    make_trainer: Callable[..., Trainer], error: type[Exception]
):
    trainer = make_trainer(max_steps=2, save_interval=1, async_save=True)
    score = trainer.reward

    def fail_in_the_second_round(*videos_and_texts: Any) -> Scores:
        if trainer.state.step:
            raise error("the server is gone")
        return score(*videos_and_texts)

    trainer.reward = fail_in_the_second_round
    with pytest.raises(RewardFailureError):
        trainer.train()
    assert latest_checkpoint(trainer.folder.checkpoints).name == "step_1"


def test_going_back_to_a_checkpoint_makes_it_the_latest(tiny_root: Path, prompts_csv: Path, tmp_path: Path):
    argv = arguments(tiny_root, prompts_csv, tmp_path / "run", max_steps=2, save_interval=1)
    first = trainer_of(argv)
    first.train()
    older = first.folder.checkpoints / "step_1"
    trainer_of([*argv, "--resume_from_checkpoint", str(older)])  # and is killed before its next save
    assert latest_checkpoint(first.folder.checkpoints).name == "step_1"


def test_the_watch_of_a_resumed_run_knows_the_rounds_before(tiny_root: Path, prompts_csv: Path, tmp_path: Path):
    settings = {"updates_per_rollout": 2, "resume_from_checkpoint": "latest"}
    first = trainer_of(arguments(tiny_root, prompts_csv, tmp_path / "run", max_steps=4, **settings))
    first.train()
    resumed = trainer_of(arguments(tiny_root, prompts_csv, tmp_path / "run", max_steps=6, **settings))
    seen = [[(row["round"], row["reward/mean"]) for row in each.reward_watch._rows] for each in (first, resumed)]
    assert len(seen[0]) == 2 and seen[0] == seen[1]


def test_validation_writes_videos_with_their_scores_and_logs_them_and_the_means(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(max_steps=2, validation_interval=2, validate_at_step0=True, video_fps=12)
    trainer.train()
    assert sorted(path.name for path in trainer.folder.samples.iterdir()) == ["step_0", "step_2"]
    folder = trainer.folder.samples / "step_2"
    scores = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert [row["video"] for row in scores] == ["000.mp4", "001.mp4"]
    assert video_length(folder / "000.mp4") == (5, 12)
    first, second = metrics_of(trainer)
    assert "valid/reward" not in first
    assert second["valid/reward"] == pytest.approx(sum(row["reward"] for row in scores) / 2, abs=1e-5)
    assert second["valid/TA"] == pytest.approx(sum(row["TA"] for row in scores) / 2, abs=1e-5)
    events = EventAccumulator(str(trainer.folder.path / "tb"))
    events.Reload()
    assert [event.step for event in events.Images("samples/000")] == [0, 2]
    assert [event.step for event in events.Scalars("valid/reward")] == [0, 2]


def test_rollout_videos_are_kept_when_asked_for(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(max_steps=3, save_interval=2, save_rollout_videos=True, video_fps=12)
    trainer.train()
    assert sorted(path.name for path in trainer.folder.rollouts.iterdir()) == ["step_0", "step_2"]
    videos = (trainer.folder.rollouts / "step_0").glob("*.mp4")
    assert [video_length(path) for path in videos] == [(5, 12)] * 4


def test_a_failed_score_is_counted_and_left_out(make_trainer: Callable[..., Trainer], tmp_path: Path):
    csv = tmp_path / "prompts.csv"
    csv.write_text("prompt\na red circle moves slowly to the left\nsomething the reward cannot read\n")
    trainer, same = (make_trainer(train_video_csv=csv, max_steps=1) for _ in range(2))
    trainer.train()
    (row,) = metrics_of(trainer)
    assert row["reward/failed"] == 2
    scores = collect_round(same).scores
    good = [total for total in scores.total.tolist() if not math.isnan(total)]
    assert row["reward/mean"] == pytest.approx(statistics.fmean(good))
    assert row["reward/std"] == pytest.approx(statistics.pstdev(good))
    assert row["reward/VQ"] == pytest.approx(statistics.fmean(scores.metrics["VQ"][~scores.total.isnan()].tolist()))
    assert row["grad_norm"] > 0


def test_the_report_is_refreshed_at_every_save_and_knows_the_last_update(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(max_steps=4, save_interval=2, validation_interval=2, validate_at_step0=True)
    written, write = [], trainer.write_report
    monkeypatch.setattr(trainer, "write_report", lambda: (write(), written.append(trainer.state.step)))
    trainer.train()
    assert written == [2, 4]
    text = (trainer.folder.path / "report.html").read_text()
    assert "4 of 4 updates, finished" in text
    assert "Pull of each step" in text and 'src="samples/step_4/001.mp4"' in text


def test_a_report_that_cannot_be_written_stops_no_training(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(max_steps=1)
    (trainer.folder.path / "report.html").mkdir(parents=True)
    trainer.train()
    assert saved_steps(trainer) == ["step_1"]
    assert "WARNING: report.html was not written" in (trainer.folder.path / "console.log").read_text()


def test_every_trained_step_logs_its_gradient_and_equalized_ones_are_alike(make_trainer: Callable[..., Trainer]):
    pulls = {}
    for use_grad_balancing in (True, False):
        trainer = make_trainer(max_steps=1, use_grad_balancing=use_grad_balancing)
        trainer.train()
        (row,) = metrics_of(trainer)
        pulls[use_grad_balancing] = [row[f"velocity_grad/step_{step:02d}"] for step in range(4)]
    scales = make_trainer(max_steps=1).update.scales.tolist()
    before = [pull / scale for pull, scale in zip(pulls[True], scales, strict=True)]
    assert before == pytest.approx(pulls[False], rel=1e-3)
    assert max(pulls[True]) / min(pulls[True]) < 1.2 < 3 < max(before) / min(before)
