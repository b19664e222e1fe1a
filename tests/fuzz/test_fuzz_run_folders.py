"""Whatever the files of a run folder say: a report is made and tells what is wrong, or a ValueError names the file."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hyvideo.observability.metrics import MetricsLog, read_metrics
from hyvideo.observability.scored_videos import read_scored_videos
from scripts.reports.run_record import read_run
from tests.support.fuzzing import changed, damaged, fuzz, json_files, only_value_errors

ROW = {"step": 2, "reward/mean": 0.5, "reward/VQ": None, "round": 1.0, "kl/coef": 1e-5}
VIDEO = {"video": "000.mp4", "prompt": "a cat", "seed": 3, "reward": 0.5, "VQ": None}


def lines_of(row: dict) -> st.SearchStrategy[bytes]:
    """A JSON Lines file that should hold such rows."""
    true = json.dumps(row).encode()
    line = st.one_of(st.just(true), changed(row).map(lambda tree: json.dumps(tree).encode()), json_files(row))
    return st.lists(line, max_size=4).map(b"\n".join).flatmap(lambda text: st.one_of(st.just(text), damaged(text)))


@fuzz(2)
@given(lines_of(ROW))
def test_any_metrics_are_read_or_refused_by_line(tmp_path: Path, content: bytes):
    for file in tmp_path.glob("metrics*"):
        file.unlink()
    (tmp_path / "metrics.jsonl").write_bytes(content)
    run = read_run(tmp_path)
    assert all(len(column) == len(run.columns["step"]) for column in run.columns.values())
    assert run.num_updates == int(run.num_updates)
    with only_value_errors("metrics.jsonl, line"):
        rows = read_metrics(tmp_path / "metrics.jsonl")
        assert all(type(row["step"]) is int and all(type(v) in (int, float) for v in row.values()) for row in rows)
    log = MetricsLog(tmp_path)  # keeps the rows, and moves the rest away
    log.log(10**16, {"reward/mean": 1.0})
    log.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == len(run.columns["step"]) + 1


@fuzz(3)
@given(lines_of(VIDEO))
def test_any_scores_of_videos_are_read_or_refused_by_name(tmp_path: Path, content: bytes):
    folder = tmp_path / "samples" / "step_1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scores.jsonl").write_bytes(content)
    with only_value_errors(folder):
        for video in read_scored_videos(folder):
            assert video.path.parent == folder and video.path != folder
            assert all(type(score) is float for score in video.scores.values())
    (tmp_path / "metrics.jsonl").touch()
    run = read_run(tmp_path)
    assert (1 in run.samples) != any("scores.jsonl" in problem or "no videos" in problem for problem in run.problems)
