"""What a validation and a round leave on disk."""

import json
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from pydantic_core import to_json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hyvideo.data.videos import video_length
from hyvideo.distributed.mesh import Mesh
from hyvideo.evaluation.drift import DRIFT, LOOKS, drift_of
from hyvideo.evaluation.paired import pairs_of
from hyvideo.models.reward_models.rewards import Scores
from hyvideo.observability.metrics import read_metrics
from hyvideo.observability.scored_videos import read_scored_videos
from hyvideo.training.collect import save_samples
from tests.support.rewards import grey_videos


@pytest.fixture
def no_encoding() -> None:
    """Here videos are encoded."""


def test_over_a_thousand_videos_are_listed_by_their_numbers_and_only_those_shown_are_written(tmp_path: Path):
    count = 1002
    videos, scores = grey_videos(0, frames=1).expand(count, -1, -1, -1, -1), Scores({}, torch.arange(count) / 1.0, {})
    save_samples(tmp_path, videos, ["a"] * count, scores, fps=8, numbers=range(count), mesh=Mesh(), shown=[7])
    assert [path.name for path in tmp_path.glob("*.mp4")] == ["007.mp4"]
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == list(range(count))


def test_validation_writes_videos_with_their_scores_and_logs_them_and_the_means(trained):
    settings = {"trackers": ["tensorboard"], "validation_interval": 2, "validate_at_step0": True, "video_fps": 12}
    training = trained(max_steps=2, run_name="mine", **settings)
    assert sorted(path.name for path in training.folder.samples.iterdir()) == ["step_0", "step_2"]
    folder = training.folder.samples / "step_2"
    scores = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert [row["video"] for row in scores] == ["000.mp4", "001.mp4"]
    assert video_length(folder / "000.mp4") == (5, 12)
    first, second = read_metrics(training.folder.path / "metrics.jsonl")
    assert "valid/reward" not in first
    assert second["valid/reward"] == pytest.approx(sum(row["reward"] for row in scores) / 2, abs=1e-5)
    assert second["valid/TA"] == pytest.approx(sum(row["TA"] for row in scores) / 2, abs=1e-5)
    events = EventAccumulator(str(training.folder.path / "tb"))
    events.Reload()
    assert [event.step for event in events.Images("samples/000")] == [0, 2]
    assert events.Tensors("run/name/text_summary")[0].tensor_proto.string_val == [b"mine"]
    assert [event.step for event in events.Scalars("valid/reward")] == [0, 2]
    log = (training.folder.path / "console.log").read_text()
    before = read_scored_videos(training.folder.samples / "step_0")
    start, end = statistics.fmean(video.reward for video in before), second["valid/reward"]
    assert f" valid at 0: reward {start:+.2f}\n" in log
    assert f" valid at 2: reward {end:+.2f} ({end - start:+.2f} since start) " in log
    assert log.count(" step ") == 2 and " command: python" in log


def test_what_training_changes_besides_the_reward_is_measured_where_the_base_was_validated(trained):
    settings = {"max_steps": 2, "validation_interval": 1, "validation_num_videos": 4}
    measured, without = (trained(**settings, validate_at_step0=at_start) for at_start in (True, False))
    folder = measured.folder.path
    rows, facts = read_metrics(folder / "metrics.jsonl"), json.loads((folder / DRIFT).read_text())
    pairs = pairs_of(*(read_scored_videos(folder / "samples" / f"step_{step}") for step in (0, 2)))
    expected = drift_of(pairs)
    expected_facts = to_json({"updates": 2, "named": str(expected)} | asdict(expected), inf_nan_mode="null")
    assert facts == json.loads(expected_facts) and set(facts["changes"]) == set(LOOKS)
    names = {f"drift/{look}{ending}" for look in LOOKS for ending in ("", "_spread")}
    for row in rows:
        assert {name for name in row if name.startswith("drift/")} == names
    assert rows[1]["drift/contrast"] == expected.changes["contrast"].shift.mean != rows[0]["drift/contrast"]
    assert f"what changed until update 2, over 4 videos: {expected}" in (folder / "console.log").read_text()
    (folder / "samples" / "step_0" / "scores.jsonl").write_text("no row\n")
    assert measured._drift(folder / "samples" / "step_2") is None  # damaged while it trains, which goes on
    assert "was not measured: " in (folder / "console.log").read_text()
    folder = without.folder.path
    assert not (folder / DRIFT).exists() and "drift/" not in (folder / "metrics.jsonl").read_text()
    told = (folder / "console.log").read_text()
    assert told.count("(validate_at_step0)") == 1 and "drift_guard" not in told and "was not measured" not in told


def test_rollout_videos_of_one_round_per_save_are_kept(trained):
    training = trained(max_steps=3, save_interval=2, video_fps=12)
    assert sorted(path.name for path in training.folder.rollouts.glob("step_*")) == ["step_0", "step_2"]
    videos = (training.folder.rollouts / "step_0").glob("*.mp4")
    assert [video_length(path) for path in videos] == [(5, 12)] * 4
