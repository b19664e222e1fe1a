"""A run folder is read as it is: whole, growing or damaged."""

import json
import math

import numpy as np
import pytest

from hyvideo.observability.scored_videos import read_scored_videos
from scripts.reports.run_record import read_run
from tests.support.run_folders import HOSTILE_PROMPTS, write_run, write_scored


def test_a_whole_run_is_read_back(tmp_path):
    run = read_run(write_run(tmp_path / "first", samples={10: 0.0, 30: 0.5}))
    assert (run.name, run.num_updates, run.metric_names) == ("first", 30, ["VQ", "MQ", "TA"])
    assert list(run.samples) == [10, 30] and run.column("seconds")[-1] == pytest.approx(10.2)
    steps, means = run.validation("reward")
    assert steps.tolist() == [10, 30] and means[1] - means[0] == pytest.approx(0.5)
    assert run.config.rollout.sde_type == "sage_grpo" and run.problems == () and run.warnings == ()


def test_a_killed_runs_torn_line_and_missing_files_are_named(tmp_path):
    folder = write_run(tmp_path / "killed", samples={10: 0.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "rew')
    (folder / "config.yaml").write_text("optimizer: {learning_rat: 1}")
    (folder / "samples" / "step_10" / "scores.jsonl").write_text('{"video": 3}\n')
    (folder / "console.log").write_text("2026-01-01 10:00:00 fine\n2026-01-01 10:00:01 WARNING: reward server slow\n")
    run = read_run(folder)
    assert run.num_updates == 30 and run.config is None and not run.samples and len(run.problems) == 3
    assert "line 31" in run.problems[0] and "learning_rat" in run.problems[1] and "'video'" in run.problems[2]
    assert run.warnings == ("2026-01-01 10:00:01 WARNING: reward server slow",)


def test_updates_whose_rows_were_lost_are_gaps_and_a_folder_without_rows_is_no_run(tmp_path):
    folder = write_run(tmp_path / "run", num_updates=12)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[1:4], lines[4][:20] + "\n", *lines[8:]]))
    assert read_run(folder).gaps == ((5, 8),)
    with pytest.raises(ValueError, match=r"No metrics at .*metrics\.jsonl"):
        read_run(tmp_path)


def test_rewards_have_one_point_per_round_and_failed_scores_are_left_out(tmp_path):
    folder = write_run(tmp_path / "run", num_updates=0)
    rows = [(1, 0, 0.5), (2, 0, 0.5), (3, 1, 0.7), (4, 1, 0.7)]
    lines = [f'{{"step": {step}, "round": {n}, "reward/mean": {reward}}}\n' for step, n, reward in rows]
    lines[3] = lines[3].replace("}", ', "perf/slowest_ratio": 1.5}')
    (folder / "metrics.jsonl").write_text("".join(lines))
    write_scored(folder / "samples" / "step_4", ["a", "b"], [None, 0.4])
    run = read_run(folder)
    steps, rewards = run.per_round("reward/mean")
    assert steps.tolist() == [1, 3] and rewards.tolist() == [0.5, 0.7]
    np.testing.assert_equal(run.per_round("perf/slowest_ratio")[1], [np.nan, 1.5])  # the last row of a round has it
    assert math.isnan(run.samples[4][0].reward) and run.validation("reward")[1].tolist() == [0.4]
    assert np.isnan(run.column("never logged")).all()


def test_prompts_with_any_line_end_come_back_whole(tmp_path):
    videos = read_scored_videos(write_scored(tmp_path, HOSTILE_PROMPTS, [0.0] * len(HOSTILE_PROMPTS)))
    assert tuple(video.prompt for video in videos) == HOSTILE_PROMPTS


def test_videos_with_notes_or_bare_ones_are_read_too(tmp_path):
    (tmp_path / "0000.mp4").touch()
    (tmp_path / "0000.json").write_text('{"prompt": "a red circle", "seed": 7}')
    (tmp_path / "0001.mp4").touch()
    noted, bare = read_scored_videos(tmp_path)
    assert (noted.prompt, noted.seed, bare.prompt, bare.seed) == ("a red circle", 7, "0001", None)
    (tmp_path / "0000.json").write_text("[]")
    with pytest.raises(ValueError, match=r"0000\.json: expected a JSON object; received '\[\]'"):
        read_scored_videos(tmp_path)


@pytest.mark.parametrize("name", ["../secret.mp4", "/etc/hostname", "a/../../b.mp4", "link.mp4", ".."])
def test_videos_elsewhere_are_not_shown(tmp_path, name):
    folder = write_scored(tmp_path / "samples", ["a"], [0.0])
    (folder / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    (folder / "scores.jsonl").write_text(json.dumps({"video": name, "prompt": "a"}) + "\n")
    with pytest.raises(ValueError, match=r"scores\.jsonl: video .* lies elsewhere"):
        read_scored_videos(folder)
