"""Whatever the files of a run folder say: a report is made and tells what is wrong, or a ValueError names the file."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyvideo.evaluation.scored_files import ScoreFile
from hyvideo.observability.metrics import MetricsLog, read_metrics
from hyvideo.observability.scored_videos import read_scored_videos
from scripts.reports.report import report_runs
from scripts.reports.run_record import read_run
from scripts.reports.win_rates import read_votes, win_rates
from tests.support.fuzzing import changed, damaged, fuzz, json_files, only_value_errors
from tests.support.run_folders import write_run

ROW = {"step": 2, "reward/mean": 0.5, "reward/VQ": None, "round": 1.0, "kl/coef": 1e-5}
VIDEO = {"video": "000.mp4", "prompt": "a cat", "seed": 3, "reward": 0.5, "VQ": None}


def lines_of(row: dict) -> st.SearchStrategy[bytes]:
    """A JSON Lines file that should hold such rows."""
    true = json.dumps(row).encode()
    line = st.one_of(st.just(true), changed(row).map(lambda tree: json.dumps(tree).encode()), json_files(row))
    return st.lists(line, max_size=4).map(b"\n".join).flatmap(lambda text: st.one_of(st.just(text), damaged(text)))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", num_updates=6, samples={0: 0.0, 4: 0.5})
    gain = {"before": 0.0, "after": 0.5, "mean": 0.5, "low": 0.1, "high": 0.9, "in_base_std": 1.5}
    gain |= {"num_pairs": 8, "num_left_out": 0}
    (folder / "gains.json").write_text(json.dumps({"updates": 6, "gains": {"reward": gain}}))
    (folder / "console.log").write_text("2026-01-01 00:00:00 WARNING slow\n")
    return folder


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


@fuzz(4)
@given(lines_of({"video": "000.mp4", "key": "0" * 24, "scores": {"VQ": 1.0, "MQ": None}}))
def test_any_kept_scores_are_read_or_refused_by_line(tmp_path: Path, content: bytes):
    (tmp_path / "scores.jsonl").write_bytes(content)
    with only_value_errors("scores.jsonl, line"):
        kept = ScoreFile(tmp_path / "scores.jsonl")._scores
        values = [value for scores in kept.values() for value in scores.values()]
        assert all(value is None or math.isfinite(value) for value in values)


STUDY = {"study": "s", "models": {"x.mp4": "A", "y.mp4": "B"}, "pairs": {"p1": ["x.mp4", "y.mp4"]}}
VOTES = {
    "votes": [
        {
            "study": "s",
            "rater": "r",
            "pair": "p1",
            "criterion": "visual_quality",
            "choice": "x.mp4",
            "at": "2026-01-01T00:00:00Z",
        },
        {
            "study": "s",
            "rater": "q",
            "pair": "p1",
            "criterion": "visual_quality",
            "choice": "tie",
            "at": "2026-01-02T00:00:00Z",
        },
    ]
}


def test_the_votes_that_are_changed_below_count(tmp_path: Path):
    for name, content in (("key", STUDY), ("votes", VOTES)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (rate,) = win_rates(tmp_path / "key.json", read_votes([tmp_path / "votes.json"]))
    assert (rate.wins, rate.ties, rate.rate) == (1, 1, 0.75)


@fuzz(4)
@given(st.one_of(st.just(json.dumps(STUDY).encode()), json_files(STUDY)), json_files(VOTES))
def test_any_votes_are_counted_or_refused_by_name(tmp_path: Path, study: bytes, votes: bytes):
    (tmp_path / "key.json").write_bytes(study)
    (tmp_path / "votes.json").write_bytes(votes)
    with only_value_errors("key.json", "votes.json", "vote"):
        for rate in win_rates(tmp_path / "key.json", read_votes([tmp_path / "votes.json"])):
            assert 0 <= rate.low <= rate.rate <= rate.high <= 1


RUN_FILES = ("metrics.jsonl", "config.yaml", "console.log", "gains.json", "samples/step_4/scores.jsonl")


@fuzz(20)
@given(st.data(), st.sampled_from(RUN_FILES))
def test_any_damage_to_a_run_folder_gives_a_report_or_a_reason(run_folder: Path, data: st.DataObject, name: str):
    path = run_folder / name
    before = path.read_bytes()
    path.write_bytes(data.draw(damaged(before)))
    try:
        with only_value_errors(run_folder):
            report = report_runs([run_folder], run_folder.parent / "report.html")
            assert report.stat().st_size > 1000
    finally:
        path.write_bytes(before)
