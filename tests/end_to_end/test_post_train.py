"""post_train.py as users call it: what a run leaves behind, and how it ends when it cannot go on."""

import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hyvideo.checkpoint.train_state import latest_checkpoint
from hyvideo.checkpoint.trained_policy import load_trained_policy
from hyvideo.config.loading import load_config, load_saved_config
from hyvideo.models.loading import load_transformer
from tests.support.training import REPOSITORY, arguments, write_prompts

PUBLIC_KEYS = {
    *("step", "reward/mean", "reward/std", "reward/VQ", "reward/MQ", "reward/TA", "loss/policy", "loss/total"),
    *("kl/position", "kl/velocity", "kl/coef", "ratio/max_deviation", "replay/mean_error", "clip_fraction"),
    *("grad_norm", "lr", "time/rollout", "time/reward", "time/anchor", "time/update"),
    *("perf/mfu_rollout", "perf/mfu_update", "perf/videos_per_gpu_hour"),
}


def test_a_run_leaves_its_rows_config_log_curves_and_checkpoint(command_line, stock_root, prompts_csv):
    """In a plain process, imports included; then once more, into the same folder."""
    settings = {"max_steps": 3, "validation_interval": 3, "trackers": ["tensorboard"]}
    argv = arguments(stock_root, prompts_csv, Path("run"), **settings)
    command, here = [sys.executable, str(REPOSITORY / "post_train.py"), *argv], command_line.folder
    first = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr

    run = here / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row.keys() >= PUBLIC_KEYS and all(math.isfinite(row[name]) for name in PUBLIC_KEYS)
    assert {row["ratio/max_deviation"] for row in rows} == {row["replay/mean_error"] for row in rows} == {0.0}
    assert load_saved_config(run / "config.yaml") == load_config(argv)
    assert "step 3/3" in (run / "console.log").read_text() and "Traceback" not in first.stderr
    assert list((run / "tb").glob("events*")) and latest_checkpoint(run / "checkpoints").name == "step_3"
    assert len(list((run / "samples" / "step_3").glob("*.mp4"))) == 2

    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    second = command_line.run("post_train.py", argv)
    assert second.returncode == 2
    (line,) = second.stderr.splitlines()
    assert line.startswith("post_train.py: output_dir: 'run' already holds a run")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_loss_that_is_not_finite_ends_the_run_naming_a_checkpoint_that_loads(command_line, tiny_root, prompts_csv):
    run = command_line.folder / "run"
    argv = arguments(tiny_root, prompts_csv, run, learning_rate=1e30, save_interval=1, max_steps=9)
    command = command_line.start("post_train.py", argv)
    # torchrun sends a signal while the report is written: other ranks have ended before this one.
    command.signal_when(signal.SIGTERM, lambda: "Last good checkpoint" in command.read("stderr"))
    finished = command.wait()
    assert finished.returncode == 1 and "Traceback" not in finished.stderr
    good = latest_checkpoint(run / "checkpoints")
    last_line = finished.stderr.splitlines()[-1]
    for said in ("not finite, the update was not made", f"Last good checkpoint: {good}.", "A lower learning_rate"):
        assert said in last_line
    load_trained_policy(load_transformer(tiny_root), good)
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == int(good.name.removeprefix("step_"))


def test_a_reward_that_raises_ends_the_run_with_its_own_traceback_and_one_error_line(command_line, tiny_root):
    csv = write_prompts(command_line.folder / "prompts.csv", ["raise"])
    reward = {"reward_model": "tests.support.rewards:Brightness", "reward_weights": '{"brightness": 1}'}
    argv = arguments(tiny_root, csv, command_line.folder / "run", **reward, validation_interval=0)
    finished = command_line.run("post_train.py", argv)
    assert finished.returncode == 1
    lines = finished.stderr.splitlines()
    frames = [line for line in lines if line.startswith("  File ")]
    assert "tests/support/rewards.py" in frames[0], finished.stderr
    assert [line for line in lines if "ERROR" in line] == lines[-1:], finished.stderr
    assert "the reward failed: RuntimeError: the reward broke" in lines[-1]


@pytest.mark.parametrize("save_interval", [0, 1])
def test_a_run_without_its_folder_says_so_and_names_no_checkpoint(command_line, tiny_root, prompts_csv, save_interval):
    run = command_line.folder / "run"
    endless = {"max_steps": 1000, "save_interval": save_interval}
    command = command_line.start("post_train.py", arguments(tiny_root, prompts_csv, run, **endless))

    def removed() -> bool:
        """Once two updates are logged the folder is moved away, which is to the run as if it were deleted."""
        return _text(run / "metrics.jsonl").count("\n") >= 2 and bool(run.rename(command_line.folder / "away"))

    command.signal_when(signal.SIGCONT, removed)
    shutil.rmtree(command_line.folder / "away")
    finished = command.wait()
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr and "intact" not in finished.stderr, finished.stderr
    last = finished.stderr.splitlines()[-1]
    assert "ERROR" in last and ("is there no longer" in last or "No finished checkpoint is in" in last), last


def test_a_signal_saves_the_run_and_the_exit_status_says_whether_to_start_again(command_line, tiny_root, prompts_csv):
    run = command_line.folder / "run"
    argv = arguments(tiny_root, prompts_csv, run, max_steps=1000, resume_from_checkpoint="latest")

    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in _text(run / "metrics.jsonl").splitlines()]

    for number, status in ((signal.SIGINT, 0), (signal.SIGTERM, 75)):
        more = len(steps()) + 2
        command = command_line.start("post_train.py", argv)
        command.signal_when(number, lambda more=more: _text(run / "metrics.jsonl").count("\n") >= more)
        finished = command.wait()
        assert finished.returncode == status, finished.stderr
        last = steps()[-1]
        assert steps() == list(range(1, last + 1))
        assert latest_checkpoint(run / "checkpoints").name == f"step_{last}"
        assert f"{number.name}: saved and stopped after step {last}" in finished.stderr


def test_a_preemption_before_the_first_round_asks_to_be_started_again(command_line, tiny_root, prompts_csv):
    run = command_line.folder / "run"
    long = {"validate_at_step0": True, "validation_num_inference_steps": 10_000}
    command = command_line.start("post_train.py", arguments(tiny_root, prompts_csv, run, **long))
    command.signal_when(signal.SIGTERM, lambda: "reward moving_shapes" in _text(run / "console.log"))
    finished = command.wait()
    assert finished.returncode == 75, finished.stderr
    assert finished.stderr.splitlines()[-1] == "post_train.py: SIGTERM: nothing to save"
    assert latest_checkpoint(run / "checkpoints") is None

    argv = arguments(tiny_root, prompts_csv, run, max_steps=1, resume_from_checkpoint="latest")
    assert command_line.run("post_train.py", argv).returncode == 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_profile_mode_leaves_a_trace_and_a_table(command_line, tiny_root, prompts_csv, tmp_path):
    run = tmp_path / "run"
    argv = arguments(tiny_root, prompts_csv, run, max_steps=3, profile=True)
    finished = command_line.run("post_train.py", argv)
    assert finished.returncode == 0, finished.stderr
    assert f"profiled until step 3: {run / 'profile'}" in finished.stderr
    recorded = ("rollout", "reward", "anchor", "update")
    assert all((run / "profile" / f"trace_rank0_{phase}.json.gz").stat().st_size > 1000 for phase in recorded)
    table = (run / "profile" / "phases.md").read_text()
    assert all(f"| {phase} |" in table for phase in recorded)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
