"""The metrics log keeps every row, and the console is readable in a terminal, in a pipe and in its log file."""

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from hyvideo.observability.console import Console, progress_line, validation_line
from hyvideo.observability.metrics import MetricsLog, missing_updates, read_metrics, stretches_in_words


def write_rows(run_dir, steps):
    log = MetricsLog(run_dir)
    for step in steps:
        log.log(step, {"reward/mean": float(step), "lr": 1e-5})
    log.close()
    return log


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_rows_that_were_lost_are_named_and_where_those_of_a_run_that_begins_again_went(tmp_path):
    log = write_rows(tmp_path, range(1, 10))
    assert log.truncate_after(9) == []
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join([lines[1], lines[2][:9] + b"\n", lines[3], lines[7][:30]]))
    log = MetricsLog(tmp_path)
    (told,) = log.truncate_after(8)
    assert "metrics.jsonl has no row of updates 1, 3, 5 to 8: these rows were lost" in told
    assert "updates 5 to 8:" in log.truncate_after(8, began_at=3)[0]
    log.path.unlink()
    assert "updates 1 to 8:" in log.truncate_after(8)[0]
    log.close()
    many = missing_updates(range(0, 100, 2), 0, 98)
    assert len(many) == 49 and stretches_in_words(many) == "1, 3, 5, 7, 9, 11, 13, 15 and 41 more stretches"
    again = write_rows(tmp_path / "again", range(5, 8))
    (told,) = again.truncate_after(4, began_at=4)
    assert told.startswith("3 updates were logged here, but no checkpoint has them: the run begins again at update 5")
    assert steps_in(again.path) == [] and steps_in(again.discarded_path) == [5, 6, 7]


def test_a_row_is_on_disk_when_log_returns_and_values_without_a_json_word_are_null_and_read_back_as_nan(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"reward/mean": 0.5, "grad_norm": torch.tensor(2.0), "clip_fraction": 0})
    line = log.path.read_text()
    assert line == '{"step": 1, "clip_fraction": 0.0, "grad_norm": 2.0, "reward/mean": 0.5}\n'
    numbers = {"d": 0.1 + 0.2, "e": 5e-324, "f": -1.7976931348623157e308}
    log.log(2, {"a": math.nan, "b": math.inf, "c": -math.inf, **numbers})
    log.close()
    written = json.loads(log.path.read_text().splitlines()[1], parse_constant=pytest.fail)  # strict JSON
    assert written == {"step": 2, "a": None, "b": None, "c": None, **numbers}
    row = read_metrics(log.path)[1]
    assert all(math.isnan(row.pop(name)) for name in "abc")
    assert row == {"step": 2, **numbers}, "to the last bit"


def test_resuming_moves_the_later_rows_and_two_resumes_from_one_step_keep_both_versions(tmp_path):
    write_rows(tmp_path, range(1, 5))
    for value in (10.0, 20.0):
        log = MetricsLog(tmp_path)
        log.truncate_after(2)
        for step in (3, 4):
            log.log(step, {"reward/mean": value})
        log.close()
    assert steps_in(log.path) == [1, 2, 3, 4]
    discarded = [json.loads(line)["reward/mean"] for line in log.discarded_path.read_text().splitlines()]
    assert discarded == [3.0, 4.0, 10.0, 10.0]
    assert [row["reward/mean"] for row in read_metrics(log.path)] == [1.0, 2.0, 20.0, 20.0]


@pytest.mark.parametrize("kill_at", [1, 2])
def test_a_kill_during_truncation_loses_nothing_and_trying_again_duplicates_nothing(tmp_path, monkeypatch, kill_at):
    write_rows(tmp_path, range(1, 6))
    log, calls, replace = MetricsLog(tmp_path), [], os.replace

    def killed(source, target):
        calls.append(target)
        if len(calls) == kill_at:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        log.truncate_after(3)
    assert set(steps_in(log.path)) | set(steps_in(log.discarded_path)) == {1, 2, 3, 4, 5}
    MetricsLog(tmp_path).truncate_after(3)
    assert steps_in(log.path) == [1, 2, 3] and steps_in(log.discarded_path) == [4, 5]


def test_a_torn_last_line_moves_to_the_discarded_file_a_whole_one_stays(tmp_path):
    log = write_rows(tmp_path, [1, 2])
    log.path.write_text(log.path.read_text() + '{"step": 3, "rewa')
    with pytest.raises(ValueError, match=r"line 3: expected a JSON object.*received b'\{\"step\": 3, \"rewa'"):
        read_metrics(log.path)
    log = write_rows(tmp_path, [3])
    assert steps_in(log.path) == [1, 2, 3] and log.discarded_path.read_text() == '{"step": 3, "rewa\n'
    log.path.write_text(log.path.read_text().rstrip("\n"))  # a whole row that lost only its line end
    log.discarded_path.unlink()
    write_rows(tmp_path, [4])
    assert steps_in(log.path) == [1, 2, 3, 4] and not log.discarded_path.exists()
    with pytest.raises(ValueError, match="'step' is taken"):
        MetricsLog(tmp_path).log(5, {"step": 7.0})


SECONDS = {"rollout": 6.0, "reward": 1.0, "anchor": 1.0, "update": 2.0}
METRICS = {"reward/mean": 0.3142, "kl/position": 1.2e-5, **{f"time/{phase}": value for phase, value in SECONDS.items()}}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def watch(folder: Path, steps: Iterable[int], *, of: int, rank: int = 0, **options: int) -> None:
    console = Console(folder, rank=rank, **options)
    console.start_progress(0, max_steps=of)
    for step in steps:
        console.progress(step, METRICS)
    console.close()


def test_a_progress_line_tells_step_time_left_reward_kl_and_where_the_time_went():
    shares = "rollout 60% reward 10% anchor 10% update 20%"
    line = f"step 12/120, 06:07 left | reward +0.314 | kl 1.2e-05 | 3.4 s/step: {shares}"
    assert progress_line(12, 120, METRICS, SECONDS, seconds_per_step=3.4) == line
    for metrics in ({}, {"reward/mean": math.nan, "kl/position": math.nan, "time/update": 0.0}):
        line = progress_line(3, 3, metrics, {"update": 0.0}, seconds_per_step=0.5)
        assert line == "step 3/3, 00:00 left | 0.5 s/step"  # what was not measured is left out


def test_a_console_that_nobody_reads_any_more_does_not_end_the_run(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w", buffering=1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", broken)
        watch(tmp_path, [1], of=3, log_interval=1)
        console = Console(tmp_path, rank=0)
        console.info("saved")
        console.warning("full")
    with contextlib.suppress(OSError):
        broken.close()
    text = (tmp_path / "console.log").read_text()
    assert all(said in text for said in ("step 1/3", "saved", "WARNING: full"))


def test_without_a_terminal_there_is_a_plain_line_per_log_interval_and_round_with_the_shares_of_all(tmp_path, capsys):
    watch(tmp_path, range(1, 6), of=5, log_interval=2)
    printed = capsys.readouterr().err
    assert re.findall(r"^step (\d)/5", printed, flags=re.MULTILINE) == ["2", "4", "5"]
    assert "\r" not in printed and "\x1b" not in printed
    console = Console(tmp_path, rank=0)
    console.start_progress(0, max_steps=4)
    for step in range(1, 5):
        times = {"time/rollout": 6.0 if step % 2 else 0.0, "time/update": 2.0}
        console.progress(step, times, round_ends=step % 2 == 0)
    console.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 2/4", "step 4/4"]
    assert all(line.endswith(": rollout 60% update 40%") for line in lines)


def test_a_validation_line_tells_the_reward_its_change_and_its_curve():
    assert validation_line(48, [-0.25]) == "valid at 48: reward -0.25"
    assert validation_line(48, [-0.25, -0.125]) == "valid at 48: reward -0.12 (+0.12 since start) ▁█"
    assert validation_line(48, [0.0, 1.0, math.nan, 0.5, 0.25]).endswith("reward +0.25 (+0.25 since start) ▁█▅▃")
    assert validation_line(48, [0.5, 0.5]).endswith("reward +0.50 (+0.00 since start) ▁▁")
    assert validation_line(48, [0.5, math.nan]) == "valid at 48: no video could be scored"


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
    assert all(part in drawn for part in ("\r", " 75%|", "step 4/4", "checkpoint saved\n"))
    assert drawn.count("\n") == 2  # the message's, and one when the line ends


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_log_file_holds_plain_dated_lines_in_any_surrounding(tmp_path, monkeypatch, stream):
    monkeypatch.setattr("sys.stderr", stream())
    console = Console(tmp_path, rank=0)
    console.info("16 prompts")
    console.warning("1 score failed")
    console.close()
    watch(tmp_path, [1], of=1)
    lines = (tmp_path / "console.log").read_text().splitlines()
    texts = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)", line)[1] for line in lines]
    assert texts[:2] == ["16 prompts", "WARNING: 1 score failed"]
    assert texts[2].startswith("step 1/1, 00:00 left | reward +0.314")
    resumed = Console(tmp_path, rank=0)
    resumed.info("second")
    resumed.close()
    assert (tmp_path / "console.log").read_text().splitlines()[:-1] == lines, "a resumed run appends"
    other = Console(tmp_path, rank=1)
    other.keep_log()
    other.warning("rank 0 is silent")
    assert (tmp_path / "console.log").read_text().endswith(" WARNING (rank 1): rank 0 is silent\n")


def test_a_full_disk_ends_the_log_file_and_not_the_run(tmp_path, capsys):
    (tmp_path / "console.log").symlink_to("/dev/full")
    console = Console(tmp_path, rank=0)
    console.info("first")
    console.info("second")
    console.close()
    said = capsys.readouterr().err.splitlines()
    assert said == ["first", "WARNING: console.log ends here ([Errno 28] No space left on device)", "second"]


def test_other_ranks_only_warn_and_pace_and_time_left_count_from_the_restored_step(tmp_path, capsys, monkeypatch):
    watch(tmp_path, [1], of=1, rank=3)
    console = Console(tmp_path, rank=3)
    console.info("not said")
    console.warning("slow disk")
    console.close()
    assert capsys.readouterr().err == "WARNING (rank 3): slow disk\n" and list(tmp_path.iterdir()) == []
    clock = iter([0.0, 100.0, 120.0])  # made, started, after two updates
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    console = Console(tmp_path, rank=0)
    console.start_progress(50, max_steps=60)
    console.progress(52, {})
    monkeypatch.undo()
    console.close()
    assert capsys.readouterr().err == "step 52/60, 01:20 left | 10 s/step\n"
