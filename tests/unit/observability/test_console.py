"""The console is readable in a terminal, in a pipe and in its log file."""

import contextlib
import io
import math
import os
import re
import sys

import pytest

from hyvideo.observability.console import Console, progress_line, validation_line

SECONDS = {"rollout": 6.0, "reward": 1.0, "anchor": 1.0, "update": 2.0}
METRICS = {"reward/mean": 0.3142, "kl/position": 1.2e-5, **{f"time/{phase}": value for phase, value in SECONDS.items()}}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_progress_line_tells_step_time_left_reward_kl_and_where_the_time_went():
    line = progress_line(12, 120, METRICS, SECONDS, seconds_per_step=3.4)
    assert line == (
        "step 12/120, 06:07 left | reward +0.314 | kl 1.2e-05 | "
        "3.4 s/step: rollout 60% reward 10% anchor 10% update 20%"
    )


@pytest.mark.parametrize("metrics", [{}, {"reward/mean": math.nan, "kl/position": math.nan, "time/update": 0.0}])
def test_what_was_not_measured_is_left_out_of_the_line(metrics):
    assert progress_line(3, 3, metrics, {"update": 0.0}, seconds_per_step=0.5) == "step 3/3, 00:00 left | 0.5 s/step"


def test_a_console_that_nobody_reads_any_more_does_not_end_the_run(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        console = Console(tmp_path, rank=0, log_interval=1)
        console.start_progress(0, 3)
        console.progress(1, METRICS)
        console.info("saved")
        console.warning("full")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            broken.close()
    text = (tmp_path / "console.log").read_text()
    assert all(said in text for said in ("step 1/3", "saved", "WARNING: full"))


def test_without_a_terminal_progress_is_plain_lines_every_log_interval_and_at_the_end(tmp_path, capsys):
    console = Console(tmp_path, rank=0, log_interval=2)
    console.start_progress(0, max_steps=5)
    for step in range(1, 6):
        console.progress(step, METRICS)
    console.close()
    printed = capsys.readouterr().err
    assert re.findall(r"^step (\d)/5", printed, flags=re.MULTILINE) == ["2", "4", "5"]
    assert "\r" not in printed and "\x1b" not in printed


def test_a_round_of_several_updates_is_one_line_with_the_shares_of_them_all(tmp_path, capsys):
    console = Console(tmp_path, rank=0)
    console.start_progress(0, max_steps=4)
    for step in range(1, 5):
        times = {"time/rollout": 6.0 if step % 2 else 0.0, "time/update": 2.0}
        console.progress(step, times, round_ends=step % 2 == 0)
    console.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 2/4", "step 4/4"]
    assert all(line.endswith(": rollout 60% update 40%") for line in lines)


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        ([-0.25], "valid at 48: reward -0.25"),
        ([-0.25, -0.125], "valid at 48: reward -0.12 (+0.12 since start) ▁█"),
        ([0.0, 1.0, math.nan, 0.5, 0.25], "valid at 48: reward +0.25 (+0.25 since start) ▁█▅▃"),
        ([0.5, 0.5], "valid at 48: reward +0.50 (+0.00 since start) ▁▁"),
        ([0.5, math.nan], "valid at 48: no video could be scored"),
    ],
)
def test_a_validation_line_tells_the_reward_its_change_and_its_curve(rewards, line):
    assert validation_line(48, rewards) == line


def test_in_a_terminal_one_line_rewrites_itself_and_messages_stand_above_it(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    console = Console(tmp_path, rank=0)
    console.start_progress(2, max_steps=4)
    console.progress(3, METRICS)
    console.info("checkpoint saved")
    console.progress(4, METRICS)
    console.close()
    drawn = terminal.getvalue()
    assert "\r" in drawn and " 75%|" in drawn and "step 4/4" in drawn
    assert "checkpoint saved\n" in drawn
    assert drawn.count("\n") == 2  # the message's, and one when the line ends


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_log_file_holds_plain_dated_lines_in_any_surrounding(tmp_path, monkeypatch, stream):
    monkeypatch.setattr("sys.stderr", stream())
    console = Console(tmp_path, rank=0)
    console.info("16 prompts")
    console.warning("1 score failed")
    console.start_progress(0, max_steps=1)
    console.progress(1, METRICS)
    console.close()
    lines = (tmp_path / "console.log").read_text().splitlines()
    texts = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)", line)[1] for line in lines]
    assert texts[:2] == ["16 prompts", "WARNING: 1 score failed"]
    assert texts[2].startswith("step 1/1, 00:00 left | reward +0.314")
    resumed = Console(tmp_path, rank=0)
    resumed.info("second")
    resumed.close()
    assert (tmp_path / "console.log").read_text().splitlines()[:-1] == lines, "a resumed run appends"


def test_a_full_disk_ends_the_log_file_and_not_the_run(tmp_path, capsys):
    (tmp_path / "console.log").symlink_to("/dev/full")
    console = Console(tmp_path, rank=0)
    console.info("first")
    console.info("second")
    console.close()
    said = capsys.readouterr().err.splitlines()
    assert said == ["first", "WARNING: console.log ends here ([Errno 28] No space left on device)", "second"]


def test_other_ranks_only_warn_and_leave_the_run_folder_alone(tmp_path, capsys):
    console = Console(tmp_path, rank=3)
    console.info("not said")
    console.start_progress(0, max_steps=1)
    console.progress(1, METRICS)
    console.warning("slow disk")
    console.close()
    assert capsys.readouterr().err == "WARNING (rank 3): slow disk\n"
    assert list(tmp_path.iterdir()) == []


def test_pace_and_time_left_count_from_the_restored_step(tmp_path, capsys, monkeypatch):
    clock = iter([0.0, 100.0, 120.0])  # made, started, after two updates
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    console = Console(tmp_path, rank=0)
    console.start_progress(50, max_steps=60)
    console.progress(52, {})
    monkeypatch.undo()
    console.close()
    assert capsys.readouterr().err == "step 52/60, 01:20 left | 10 s/step\n"
