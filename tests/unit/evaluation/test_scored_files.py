"""A video file is scored once, until file, prompt or reward changes; what the videos of a CSV are called."""

import math
from pathlib import Path

import pytest
import torch

from hyvideo.data.prompts import Prompt
from hyvideo.data.videos import write_video
from hyvideo.evaluation.jobs import jobs_of_csv
from hyvideo.evaluation.scored_files import NamedReward, ScoreFile
from hyvideo.models.reward_models.registry import RewardContext
from tests.support.rewards import Brightness, FileBrightness, grey_videos


@pytest.fixture
def videos(tmp_path: Path) -> list[Path]:
    """Three mp4 files of 5 frames in grey 10, 100 and 200."""
    paths = [tmp_path / f"{number:04d}.mp4" for number in range(3)]
    for path, video in zip(paths, grey_videos(10, 100, 200), strict=True):
        write_video(path, video, fps=24)
    return paths


def named(model: Brightness, **options: object) -> NamedReward:
    return NamedReward("brightness", options, model)


def test_scores_are_kept_and_come_back_without_the_reward(tmp_path, videos):
    first, second = Brightness(), Brightness()
    found = ScoreFile(tmp_path / "scores.jsonl").score(named(first), videos, ["a", "b", "c"])
    assert found["brightness"] == pytest.approx([10, 100, 200], abs=2) and found["length"] == [1.0, 1.0, 1.0]
    assert ScoreFile(tmp_path / "scores.jsonl").score(named(second), videos, ["a", "b", "c"]) == found
    assert (first.calls, second.calls) == ([3], [])


def test_what_a_score_depends_on_makes_it_new(tmp_path, videos):
    book, reward = ScoreFile(tmp_path / "scores.jsonl"), Brightness()
    book.score(named(reward), videos, ["a", "b", "c"])
    book.score(named(reward), videos, ["a", "B", "c"])
    book.score(named(reward, num_frames=4), videos[:1], ["a"])
    write_video(videos[2], grey_videos(50)[0], fps=24)
    assert book.score(named(reward), videos, ["a", "b", "c"])["brightness"][2] == pytest.approx(50, abs=2)
    assert reward.calls == [3, 1, 1, 1]


def test_a_stopped_run_keeps_its_whole_blocks_and_drops_a_torn_line(tmp_path, videos):
    path, reward = tmp_path / "scores.jsonl", Brightness(RewardContext(batch_size=2))
    ScoreFile(path).score(named(reward), videos[:2], ["a", "b"])
    path.write_text(path.read_text() + '{"video": "0002.mp4", "ke')
    found = ScoreFile(path).score(named(reward), videos, ["a", "b", "c"])
    assert reward.calls == [2, 1] and found["brightness"][2] == pytest.approx(200, abs=2)
    assert len(path.read_text().splitlines()) == 3


def test_a_reward_that_reads_files_gets_the_files_themselves_and_a_missing_one_is_named(tmp_path, videos):
    book, reward = ScoreFile(tmp_path / "scores.jsonl"), FileBrightness()
    book.score(named(reward), videos, ["a", "b", "c"])
    assert reward.paths == videos
    with pytest.raises(ValueError, match=r"no video '.*0009\.mp4'"):
        book.score(named(reward), [tmp_path / "0009.mp4"], ["a"])


def test_videos_of_other_shapes_are_scored_apart(tmp_path, videos):
    write_video(videos[1], grey_videos(100, frames=9)[0], fps=24)
    reward = Brightness()
    found = ScoreFile(tmp_path / "scores.jsonl").score(named(reward), videos, ["a", "b", "c"])
    assert found["brightness"] == pytest.approx([10, 100, 200], abs=2) and reward.calls == [1, 1, 1]


def test_a_failed_score_stays_nan_and_is_not_tried_again(tmp_path, videos):
    reward = Brightness()
    for _ in range(2):
        found = ScoreFile(tmp_path / "scores.jsonl").score(named(reward), videos, ["fail", "infinite", "c"])
        assert [math.isnan(value) for value in found["brightness"]] == [True, True, False]
    assert reward.calls == [3]


@pytest.mark.parametrize("given", [{"brightness": [1.0]}, {"brightness": torch.ones(4), "length": torch.ones(3)}, None])
def test_a_reward_that_gives_no_score_per_video_is_named_and_a_list_is_one(tmp_path, videos, monkeypatch, given):
    monkeypatch.setattr(Brightness, "__call__", lambda self, videos, prompts: given)
    with pytest.raises(ValueError, match="The reward brightness must "):
        ScoreFile(tmp_path / "scores.jsonl").score(named(Brightness()), videos, ["a", "b", "c"])
    assert not (tmp_path / "scores.jsonl").exists()
    given = {"brightness": [1.0, 2.0, 3.0], "length": [math.inf, 1.0, 1.0]}
    found = ScoreFile(tmp_path / "scores.jsonl").score(named(Brightness()), videos, ["a", "b", "c"])
    assert found["brightness"] == [1.0, 2.0, 3.0] and math.isnan(found["length"][0])


def names(texts: list[str], seeds: list[int], names: str = "vbench", own: int | None = None) -> list[str]:
    prompts = [Prompt(text, index, own, None) for index, text in enumerate(texts)]
    return [job.path.name for job in jobs_of_csv(Path("videos"), prompts, seeds, names)]


def test_vbench_finds_every_video_under_its_prompt_and_number():
    long = "A very " + "long " * 50 + "road."
    expected = ["A cat.-0.mp4", "A cat.-1.mp4", f"{long[:180]}-0.mp4", f"{long[:180]}-1.mp4"]
    assert names(["A cat.", long], [7, 3]) == expected
    assert names(["A cat."], [7, 3], own=5) == ["A cat.-0.mp4"]
    assert names(["A cat."], [7, 3], "row") == ["0000_seed7.mp4", "0000_seed3.mp4"]


def test_names_that_vbench_could_not_find_are_refused():
    for texts in (["a/b"], ["木" * 180]):
        with pytest.raises(ValueError, match=f"'{texts[0]}' cannot be the name of a file"):
            names(texts, [0])
    for texts in (["same", "same"], ["x" * 180 + "a", "x" * 180 + "b"]):
        with pytest.raises(ValueError, match=f"two videos would be '{texts[0][:180]}-0.mp4'"):
            names(texts, [0])
