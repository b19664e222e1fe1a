"""A run is compared with its own beginning, pair by pair, and the verdict says what that shows."""

import json
import math

import numpy as np
import pytest

from hyvideo.evaluation.paired import Gain, PairedComparison
from scripts.reports import improvement as module
from scripts.reports.improvement import HELD_OUT, against, gains_over_training, improvement, verdict_of, verdict_of_runs
from scripts.reports.run_record import read_run
from tests.support.run_folders import PROMPTS, change_rows, write_run, write_scored


def test_the_first_and_the_last_validation_are_paired_but_for_failed_scores_and_other_prompts(tmp_path):
    found = improvement(read_run(write_run(tmp_path / "run", samples={0: 0.1, 10: 9.0, 30: 0.6})))
    assert (found.before, found.after) == ("validation before training", "validation after update 30")
    reward = found.gains["reward"]
    assert (reward.num_pairs, reward.direction) == (8, "better")
    assert reward.mean == pytest.approx(0.5) and reward.low == pytest.approx(0.5)  # each pair gains as much
    assert reward.after - reward.before == pytest.approx(0.5)
    assert list(found.gains) == ["reward", "VQ", "MQ", "TA"]
    assert improvement(read_run(write_run(tmp_path / "one", samples={30: 0.1}))) is None
    assert improvement(read_run(write_run(tmp_path / "none"))) is None
    folder = write_run(tmp_path / "failed", samples={0: 0.0})
    rewards = [None, *[1.0] * 7]
    write_scored(folder / "samples" / "step_30", [*PROMPTS[:7], "another prompt"], rewards)
    reward = improvement(read_run(folder)).gains["reward"]
    assert (reward.num_pairs, reward.num_left_out) == (6, 1)


def test_held_out_gains_are_preferred_and_must_be_readable(tmp_path):
    folder = write_run(tmp_path / "run", samples={0: 0.0, 30: -1.0})
    gain = {"before": 0.1, "after": 0.5, "mean": 0.4, "low": 0.3, "high": 0.5}
    gain |= {"in_base_std": 0.3, "num_pairs": 128, "num_left_out": 0}
    (folder / HELD_OUT).write_text(json.dumps({"updates": 30, "gains": {"VQ": gain, "reward": gain}}))
    found = improvement(read_run(folder))
    assert [(name, g.num_pairs) for name, g in found.gains.items()] == [("reward", 128), ("VQ", 128)]
    assert module.read_held_out(folder).comparison == found, "the demo says what its report says"
    assert "128 videos of the same prompts and seeds: the trained model against the base" in verdict_of(found).detail
    assert found.pairs == (), "prove_learning keeps no videos"
    for name in module.HELD_OUT_VIDEOS:
        write_scored(folder / name, PROMPTS, [1.0] * 8)
    pairs = improvement(read_run(folder)).pairs
    assert len(pairs) == 8 and [video.path.parent.name for video in pairs[0]] == ["before", "after"]
    (folder / HELD_OUT).write_text(json.dumps({"updates": 31, "gains": {"VQ": gain, "reward": gain}}))
    assert improvement(read_run(folder)).after == "validation after update 30", "measured of another policy"
    for broken in ('{"reward": {"mean": 1}}', json.dumps({"updates": 30, "gains": {"VQ": gain}})):
        (folder / HELD_OUT).write_text(broken)
        with pytest.raises(ValueError, match=r"gains\.json: expected paired gains by name"):
            improvement(read_run(folder))


def test_the_worst_median_and_best_gain_are_found_among_scores_that_did_not_fail():
    for after, chosen in (
        ([0.5, -1.0, 3.0, 0.1, 0.2], {"worst": 1, "median": 4, "best": 2}),
        ([0.5, math.nan, 3.0, 0.1, 0.2], {"worst": 3, "median": 0, "best": 2}),
        ([math.nan, 0.5, 0.1], {"worst": 2, "best": 1}),
        ([0.5], {}),
    ):
        assert module.worst_median_best([0.0] * len(after), after) == chosen


def test_every_validation_is_compared_with_the_first_that_the_last_can_be_compared_with(tmp_path):
    means = {0: 0.0, 10: 0.25, 20: -0.5, 30: 1.0}
    folder = write_run(tmp_path / "run", samples=means)
    found = gains_over_training(read_run(folder))
    assert {step: gain.mean for step, gain in found.items()} == pytest.approx(means)
    assert found[0].relative.low == found[0].relative.high == 0
    spread = np.std([video.reward for video in read_run(folder).samples[0]], ddof=1)
    assert found[30].relative.mean == pytest.approx(1.0 / spread)
    write_scored(folder / "samples" / "step_0", ["another"] * 8, [0.0] * 8)
    assert list(gains_over_training(read_run(folder))) == [10, 20, 30]
    assert gains_over_training(read_run(write_run(tmp_path / "once", samples={30: 0.0}))) == {}


def test_runs_are_compared_on_the_prompts_they_share(tmp_path):
    runs = [read_run(write_run(tmp_path / name, samples={30: mean})) for name, mean in (("sage", 0.5), ("cps", 0.2))]
    found = against(*runs)
    assert (found.before, found.after) == ("sage", "cps")
    assert found.gains["reward"].mean == pytest.approx(-0.3)
    assert against(runs[0], read_run(write_run(tmp_path / "no samples"))) is None


def test_validations_of_other_settings_are_not_compared(tmp_path):
    folder = write_run(tmp_path / "run", samples={0: 0.0, 10: 0.1, 20: 0.5, 30: 0.6})
    for step in (20, 30):
        scores = folder / "samples" / f"step_{step}" / "scores.jsonl"
        change_rows(scores, lambda row: row | {"how": "64x64, seed 2"})
    found = improvement(read_run(folder))
    assert (found.before, found.after) == ("validation after update 20", "validation after update 30")
    assert found.gains["reward"].mean == pytest.approx(0.1)
    assert against(read_run(write_run(tmp_path / "other", samples={30: 0.5})), read_run(folder)) is None


def gain(mean, low, high, num_pairs=16):
    return Gain(0.0, mean, mean, low, high, mean / 2, num_pairs, 0)  # the base's scores have a spread of 2


def test_the_verdict_says_whether_and_by_how_much_and_of_a_reward_that_rose_while_a_metric_fell_that():
    for reward, direction, words in (
        (gain(0.4, 0.3, 0.5), "better", "Improved: reward +0.20 base std, 95 % interval +0.15 to +0.25"),
        (gain(-0.4, -0.5, -0.3), "worse", "Got worse: reward −0.20 base std"),
        (gain(0.1, -0.1, 0.3), "unclear", "No clear change: reward +0.05 base std"),
        (gain(0.4, 0.3, 0.5, num_pairs=3), "unclear", "Too few videos to tell"),
    ):
        verdict = verdict_of(PairedComparison("before training", "after update 30", {"reward": reward}))
        assert verdict.direction == direction and verdict.headline.startswith(words)
        assert f"{reward.num_pairs} videos of the same prompts and seeds" in verdict.detail
    gains = {"reward": gain(0.4, 0.3, 0.5), "MQ": gain(0.5, 0.4, 0.6), "TA": gain(-0.2, -0.3, -0.1)}
    assert verdict_of(PairedComparison("a", "b", gains)).detail.endswith("MQ rose. TA fell.")


def compared(*gains):
    return [one and PairedComparison("a", "b", {"reward": one}) for one in gains]


def test_of_several_runs_the_one_that_gained_most_wins_where_no_interval_overlaps_with_its():
    gains = compared(gain(0.2, 0.1, 0.25), gain(0.4, 0.3, 0.5), gain(0.02, -0.2, 0.2))
    verdict = verdict_of_runs({"dance": 8, "sage": 8, "cps": 8}, gains, 8)
    assert (verdict.direction, verdict.headline) == ("better", "sage gained most")
    assert verdict.detail.startswith("sage gained +0.20 base std, 95 % interval +0.15 to +0.25. 2 of 3 runs clearly")
    assert verdict_of_runs({"cps": 8}, gains[2:], 8).headline == "No run clearly improved"


def test_no_run_wins_where_another_ones_interval_overlaps_with_its_or_is_not_known():
    for other in (gain(0.2, 0.1, 0.35), gain(0.9, -0.1, 1.9), None):
        verdict = verdict_of_runs({"sage": 8, "other": 4}, compared(gain(0.4, 0.3, 0.5), other), 4)
        assert (verdict.direction, verdict.headline) == ("unclear", "No run clearly gained most")
        assert verdict.detail.startswith("sage gained +0.20 base std, 95 % interval +0.15 to +0.25.")
        assert ("The interval of other overlaps." if other else "other cannot be compared.") in verdict.detail
