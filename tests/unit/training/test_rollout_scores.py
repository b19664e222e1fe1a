"""What every video of a run scored is on disk: a row each, appended round by round, as long as its round counts."""

import json
import math
from pathlib import Path

import pytest

from hyvideo.algorithms.algorithm import Trajectory
from hyvideo.training.run import Run
from tests.support.ranks import run_on_ranks
from tests.support.training import arguments, train_all, training_of


def rows_below(folder: Path, name: str = "scores.jsonl") -> list[dict]:
    path = folder / "rollouts" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_a_row_says_what_a_video_of_a_round_scored_and_its_advantage(make_training, monkeypatch):
    training, seen = make_training(max_steps=2), []
    begin = Run.begin_updates

    def look(run: Run, trajectory: Trajectory) -> None:
        trajectory.scores.total[1] = math.nan  # a score that failed
        seen.append(trajectory)
        begin(run, trajectory)

    monkeypatch.setattr(Run, "begin_updates", look)
    training.train()
    rows = rows_below(training.folder.path)
    places = [(row["step"], row["round"], row["video"]) for row in rows]
    assert places == [(s + 1, s, v) for s in (0, 1) for v in range(4)]
    for row in rows:
        trajectory, video = seen[row["round"]], row["video"]
        assert row["prompt"] == trajectory.prompts[video] and row["seed"] == 42
        assert {"VQ", "MQ", "TA", "prompt_index"} <= row.keys()
        assert row["VQ"] == pytest.approx(float(trajectory.scores.metrics["VQ"][video]))
        if video == 1:
            assert row["reward"] is None and row["advantage"] == 0
        else:
            assert row["reward"] == pytest.approx(float(trajectory.scores.total[video]))
    assert all(rows[n]["advantage"] == -rows[n + 1]["advantage"] != 0 for n in (2, 6))  # the second group of each round


def test_a_resumed_run_discards_the_rows_of_rounds_that_it_makes_again(trained, tiny_root, prompts_csv):
    settings = {"max_steps": 3, "save_interval": 1, "keep_last": 3}
    training = trained(**settings)
    folder, whole = training.folder.path, rows_below(training.folder.path)
    with (folder / "rollouts" / "scores.jsonl").open("a") as file:
        file.write('{"step": 3, "round": 2, "vid')  # a kill while it wrote
    given = folder / "checkpoints" / "step_1"
    again = training_of(arguments(tiny_root, prompts_csv, folder, **settings, resume_from_checkpoint=given))
    assert rows_below(folder) == whole[:4]
    discarded = (folder / "rollouts" / "scores.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in discarded[:-1]] == whole[4:] and discarded[-1].endswith('"vid')
    again.train()
    assert rows_below(folder) == whole


def test_the_ranks_of_a_run_write_the_rows_that_one_process_writes(trained, tiny_root, prompts_csv, tmp_path):
    alone = trained(max_steps=1)
    sizes = {"batch_size": 2, "enable_fsdp": True, "max_steps": 1}
    run_on_ranks(2, train_all, [arguments(tiny_root, prompts_csv, tmp_path / "ranks", **sizes)])
    ours, theirs = rows_below(alone.folder.path), rows_below(tmp_path / "ranks")
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == (pytest.approx(value, abs=1e-3) if isinstance(value, float) else value), name
