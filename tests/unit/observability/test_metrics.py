"""The metrics log keeps every row: through NaNs, torn lines, restarts and kills."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from hyvideo.observability.metrics import MetricsLog, missing_updates, read_metrics, stretches_in_words
from tests.support.training import REPOSITORY


def write_rows(run_dir, steps):
    log = MetricsLog(run_dir)
    for step in steps:
        log.log(step, {"reward/mean": float(step), "lr": 1e-5})
    log.close()
    return log


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_two_processes_cannot_log_in_one_folder(tmp_path):
    first = MetricsLog(tmp_path)
    first.log(1, {"lr": 1.0})
    program = f"from hyvideo.observability.metrics import MetricsLog; MetricsLog({str(tmp_path)!r}).truncate_after(0)"
    other = [sys.executable, "-c", program]
    refused = subprocess.run(other, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert f"another process is training in '{tmp_path}'" in refused.stderr
    assert steps_in(first.path) == [1]
    first.close()
    assert subprocess.run(other, cwd=REPOSITORY, check=False).returncode == 0


def test_rows_that_were_lost_are_named(tmp_path):
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


def test_a_run_that_begins_again_says_where_its_rows_went(tmp_path):
    log = write_rows(tmp_path, range(5, 8))
    (told,) = log.truncate_after(4, began_at=4)
    assert told.startswith("3 updates were logged here, but no checkpoint has them: the run begins again at update 5")
    assert steps_in(log.path) == [] and steps_in(log.discarded_path) == [5, 6, 7]


def test_many_lost_stretches_are_counted():
    stretches = missing_updates(range(0, 100, 2), 0, 98)
    assert len(stretches) == 49
    assert stretches_in_words(stretches) == "1, 3, 5, 7, 9, 11, 13, 15 and 41 more stretches"


def test_a_row_is_on_disk_when_log_returns_step_first_and_names_sorted(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"reward/mean": 0.5, "grad_norm": torch.tensor(2.0), "clip_fraction": 0})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "clip_fraction": 0.0, "grad_norm": 2.0, "reward/mean": 0.5}\n'
    log.close()


def test_values_without_a_json_word_become_null_and_read_back_as_nan(tmp_path):
    log = MetricsLog(tmp_path)
    numbers = {"d": 0.1 + 0.2, "e": 5e-324, "f": -1.7976931348623157e308}
    log.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, **numbers})
    log.close()

    def refuse(word):
        raise AssertionError(f"{word} is not strict JSON")

    written = json.loads(log.path.read_text(), parse_constant=refuse)
    assert written == {"step": 1, "a": None, "b": None, "c": None, **numbers}
    (row,) = read_metrics(log.path)
    assert math.isnan(row.pop("a")) and math.isnan(row.pop("b")) and math.isnan(row.pop("c"))
    assert row == {"step": 1, **numbers}, "to the last bit"


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

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            log.truncate_after(3)
    assert set(steps_in(log.path)) | set(steps_in(log.discarded_path)) == {1, 2, 3, 4, 5}

    MetricsLog(tmp_path).truncate_after(3)
    assert steps_in(log.path) == [1, 2, 3]
    assert steps_in(log.discarded_path) == [4, 5]


def test_a_torn_last_line_moves_to_the_discarded_file_and_logging_goes_on(tmp_path):
    log = write_rows(tmp_path, [1, 2])
    with log.path.open("a") as file:
        file.write('{"step": 3, "rewa')
    with pytest.raises(ValueError, match=r"line 3: expected a JSON object.*received b'\{\"step\": 3, \"rewa'"):
        read_metrics(log.path)
    log = write_rows(tmp_path, [3])
    assert steps_in(log.path) == [1, 2, 3]
    assert log.discarded_path.read_text() == '{"step": 3, "rewa\n'


def test_a_whole_last_row_that_lost_only_its_line_end_is_kept(tmp_path):
    log = write_rows(tmp_path, [1, 2])
    log.path.write_text(log.path.read_text().rstrip("\n"))
    log = write_rows(tmp_path, [3])
    assert steps_in(log.path) == [1, 2, 3]
    assert not log.discarded_path.exists()


def test_a_step_that_does_not_increase_and_a_metric_of_its_name_are_refused(tmp_path):
    write_rows(tmp_path, [1, 2, 3])
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match="already holds step 3, received step 3"):
        log.log(3, {"x": 1.0})
    with pytest.raises(ValueError, match="'step' is taken"):
        log.log(4, {"step": 7.0})
