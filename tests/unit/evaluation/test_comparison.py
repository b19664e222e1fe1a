"""Comparing models by means, intervals, paired gains and win rates; a video file is scored once."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic_core import to_json

from hyvideo.data.prompts import Prompt
from hyvideo.data.videos import write_video
from hyvideo.evaluation.comparison import compare, with_overall
from hyvideo.evaluation.intervals import bootstrap_interval, seed_interval
from hyvideo.evaluation.jobs import jobs_of_csv
from hyvideo.evaluation.paired import paired_gain
from hyvideo.evaluation.scored_files import NamedReward, ScoreFile
from hyvideo.models.reward_models.registry import RewardContext
from scripts.reports.markdown import markdown_of
from tests.support.rewards import Brightness, FileBrightness, grey_videos

ROWS = np.array([0, 0, 1, 1, 2, 2])
"""Three prompts with two seeds each."""


def scores(*values: float) -> dict[str, np.ndarray]:
    return {"TA": np.array(values)}


BASE = scores(0.0, 2.0, 4.0, 4.0, 1.0, 1.0)


def test_a_prompt_with_several_seeds_counts_once():
    unequal = compare({"base": scores(0.0, math.nan, 4.0, 4.0, 2.0, 2.0)}, ROWS)
    mean = unequal.means["base"]["TA"]
    assert mean.mean == pytest.approx((0 + 4 + 2) / 3)
    assert (mean.num, unequal.num_failed["base"]["TA"], unequal.num_prompts, unequal.num_videos) == (3, 1, 3, 6)
    once = compare({"base": scores(0.0, 4.0, 2.0)}, np.arange(3)).means["base"]["TA"]
    assert mean == once, "more seeds do not narrow the interval"


def test_gains_are_paired_with_the_first_model_and_one_that_always_wins_has_an_interval_of_some_width():
    comparison = compare({"base": BASE, "trained": {"TA": BASE["TA"] + 0.5}}, ROWS)
    gain = comparison.gains["trained"]["TA"]
    assert (gain.mean, gain.low, gain.high) == (0.5, 0.5, 0.5) and list(comparison.gains) == ["trained"]
    rate = comparison.win_rates["TA"]["trained"]["base"]
    assert rate.mean == 1.0 and 0.3 < rate.low < 0.5 and rate.high == 1.0


def test_win_rates_count_ties_half_and_mirror_each_other_without_pairs_that_failed():
    comparison = compare({"base": BASE, "trained": scores(1.0, 2.0, 5.0, 5.0, 0.0, 0.0)}, ROWS)
    forth, back = comparison.win_rates["TA"]["trained"]["base"], comparison.win_rates["TA"]["base"]["trained"]
    assert forth.mean == pytest.approx((0.75 + 1 + 0) / 3) and back.mean == pytest.approx(1 - forth.mean)
    assert (back.low, back.high) == (pytest.approx(1 - forth.high), pytest.approx(1 - forth.low))
    failed = BASE["TA"] + 1.0
    failed[:2] = math.nan
    comparison = compare({"base": BASE, "trained": {"TA": failed}}, ROWS)
    assert comparison.gains["trained"]["TA"].num == comparison.win_rates["TA"]["trained"]["base"].num == 2


def test_overall_is_the_weighted_sum_that_fails_with_its_parts_and_does_without_what_judges_no_such_prompt():
    nan, weights = math.nan, {"VQ": 0.5, "TA": 1.0}
    parts = {"VQ": np.array([1.0, nan, nan, nan]), "TA": np.array([2.0, 3.0, 4.0, nan])}
    judged = {"VQ": np.array([True, True, False, False]), "TA": np.array([True, True, True, False])}
    judged["Overall"] = judged["VQ"] | judged["TA"]
    found = with_overall(parts, weights, judged)
    assert list(found) == ["Overall", "VQ", "TA"]
    np.testing.assert_array_equal(found["Overall"], [2.5, nan, 4.0, nan])
    assert compare({"base": found}, np.arange(4), judged).num_failed["base"] == {"Overall": 1, "VQ": 1, "TA": 0}


def test_the_table_has_a_row_per_model_also_where_a_metric_failed_and_the_json_everything():
    comparison = compare({"base": BASE, "trained": scores(1.0, 2.0, 5.0, 5.0, 0.0, 0.0)}, ROWS)
    lines = markdown_of(comparison).splitlines()
    assert lines[0].startswith("3 prompts, 6 videos of each model.") and "No score failed." in lines[0]
    assert lines[2:5] == ["| model | TA |", "| --- | --- |", f"| base | {comparison.means['base']['TA']} |"]
    rate = comparison.win_rates["TA"]["trained"]["base"]
    assert f"| trained | 0.58 [{rate.low:.2f}, {rate.high:.2f}] |  |" in lines
    assert json.loads(to_json(comparison))["means"]["base"]["TA"]["mean"] == pytest.approx(2.0)
    nothing, half = scores(*[math.nan] * 6), scores(1.0, 2.0, *[math.nan] * 4)
    comparison = compare({"base": BASE, "broken": nothing, "half": half}, ROWS)
    table = markdown_of(comparison)
    assert "| broken | none scored |" in table and "| half | +1.500 [no interval from 1] |" in table
    assert json.loads(to_json(comparison, inf_nan_mode="null"))["means"]["broken"]["TA"]["mean"] is None


def coverage(interval_of, size: int, num_studies: int = 1000, draw: str = "normal") -> float:
    """Share of studies of `size` values whose interval holds the true mean, 0.3."""
    rng, centre = np.random.default_rng(0), 0.3 - (draw == "exponential")
    studies = [interval_of(centre + getattr(rng, draw)(size=size)) for _ in range(num_studies)]
    return sum(study.low <= 0.3 <= study.high for study in studies) / num_studies


@pytest.mark.parametrize("size", [5, 8, 16])
def test_intervals_of_few_values_cover_the_mean(size):
    for interval_of in (seed_interval, bootstrap_interval):
        assert coverage(interval_of, size) == pytest.approx(0.95, abs=0.02)
        assert interval_of([1.0, math.nan, 2.0, 6.0]) == interval_of([1.0, 2.0, 6.0])


def test_from_thirty_values_on_an_interval_follows_their_shape_and_of_fewer_it_is_students_or_of_one_none():
    values = np.random.default_rng(0).exponential(size=30)
    interval, symmetric = bootstrap_interval(values), seed_interval(values)
    assert interval.high - interval.mean > 1.05 * (interval.mean - interval.low)
    assert bootstrap_interval(values[:29]) == seed_interval(values[:29]) and interval != symmetric
    interval = seed_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0 and interval.num == 3
    assert interval.high - interval.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert interval.mean - interval.low == pytest.approx(interval.high - interval.mean)
    single = seed_interval([0.25])
    assert str(bootstrap_interval([0.25, math.nan])) == str(single)
    assert single.mean == 0.25 and math.isnan(single.low) and math.isnan(single.high)
    assert str(single) == "+0.250 [no interval from 1]"


@pytest.mark.parametrize(
    ("compute", "values", "message"),
    [
        (bootstrap_interval, [[1.0, math.inf]], "infinite"),
        (paired_gain, ([1.0, 2.0], [1.0, 2.0, 3.0]), r"\(2,\) \(3,\)"),
        (paired_gain, ([1.0, math.nan, 2.0], [math.nan, 1.0, 2.0]), "at least 2 pairs without NaN, received 1"),
        (paired_gain, ([1.0, math.inf], [1.0, 2.0]), "infinite"),
    ],
)
def test_values_without_an_interval_are_refused_with_what_came(compute, values, message):
    with pytest.raises(ValueError, match=message):
        compute(*values)


def test_a_constant_shift_has_an_interval_of_no_width_and_counts_in_the_bases_spread():
    before = np.array([0.0, 1.0, 2.0, 3.0])
    gain = paired_gain(before, before + 0.5)
    assert (gain.mean, gain.low, gain.high) == (0.5, 0.5, 0.5)
    assert gain.in_base_std == pytest.approx(0.5 / before.std(ddof=1))
    assert (gain.num_pairs, gain.num_left_out) == (4, 0)
    assert math.isnan(paired_gain([1.0, 1.0], [2.0, 3.0]).in_base_std), "a base that does not vary"
    before, after = torch.tensor([0.0, math.nan, 2.0, 3.0]), torch.tensor([1.0, 5.0, math.nan, 5.0])
    gain = paired_gain(before, after)  # a score failed on either side
    assert (gain.mean, gain.num_pairs, gain.num_left_out) == (1.5, 2, 2) and "2 pairs, 2 left out" in str(gain)


def test_the_interval_is_that_of_the_mean_of_the_differences_and_always_the_same(monkeypatch):
    rng = np.random.default_rng(3)
    before = rng.normal(scale=10, size=400)  # pairing removes this spread
    difference = rng.normal(loc=0.2, size=400)
    gain = paired_gain(before, before + difference)
    half_width = 1.96 * difference.std() / math.sqrt(400)
    ends = [difference.mean() - half_width, difference.mean() + half_width]
    assert [gain.low, gain.high] == pytest.approx(ends, abs=0.1 * half_width)
    monkeypatch.setattr("hyvideo.evaluation.intervals._RESAMPLED_VALUES_AT_ONCE", 7777)
    assert paired_gain(before, before + difference) == gain  # whatever is resampled at once


@pytest.mark.parametrize("draw", ["normal", "exponential"])
def test_the_interval_covers_the_true_gain_in_about_95_percent_of_studies(draw, monkeypatch):
    monkeypatch.setattr("hyvideo.evaluation.intervals._NUM_RESAMPLES", 400)
    assert 0.91 <= coverage(partial(paired_gain, np.zeros(128)), 128, 400, draw) <= 0.98


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
    with pytest.raises(FileNotFoundError, match=r"0009\.mp4"):
        book.score(named(reward), [tmp_path / "0009.mp4"], ["a"])


def test_videos_of_other_shapes_are_scored_apart_and_a_failed_score_stays_nan_and_is_not_tried_again(tmp_path, videos):
    write_video(videos[1], grey_videos(100, frames=9)[0], fps=24)
    reward = Brightness()
    found = ScoreFile(tmp_path / "scores.jsonl").score(named(reward), videos, ["a", "b", "c"])
    assert found["brightness"] == pytest.approx([10, 100, 200], abs=2) and reward.calls == [1, 1, 1]
    reward = Brightness()
    for _ in range(2):
        found = ScoreFile(tmp_path / "failed.jsonl").score(named(reward), videos, ["fail", "infinite", "c"])
        assert [math.isnan(value) for value in found["brightness"]] == [True, True, False]
    assert reward.calls == [1, 1, 1]


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


def test_vbench_finds_every_video_under_its_prompt_and_number_or_it_is_refused():
    long = "A very " + "long " * 50 + "road."
    expected = ["A cat.-0.mp4", "A cat.-1.mp4", f"{long[:180]}-0.mp4", f"{long[:180]}-1.mp4"]
    assert names(["A cat.", long], [7, 3]) == expected
    assert names(["A cat."], [7, 3], own=5) == ["A cat.-0.mp4"]
    assert names(["A cat."], [7, 3], "row") == ["0000_seed7.mp4", "0000_seed3.mp4"]
    for texts in (["a/b"], ["木" * 180]):
        with pytest.raises(ValueError, match=f"'{texts[0][:99]}.*cannot be the name of a file"):
            names(texts, [0])
    for texts in (["same", "same"], ["x" * 180 + "a", "x" * 180 + "b"]):
        with pytest.raises(ValueError, match=f"two videos would be '{texts[0][:180]}-0.mp4'"):
            names(texts, [0])
