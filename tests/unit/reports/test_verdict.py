"""A report's verdict says whether a run improved, by how much, and which of several gained most."""

import pytest

from hyvideo.evaluation.paired import Gain, PairedComparison
from scripts.reports.verdict import verdict_of, verdict_of_runs


def gain(mean, low, high, num_pairs=16):
    return Gain(0.0, mean, mean, low, high, mean / 2, num_pairs, 0)  # the base's scores have a spread of 2


@pytest.mark.parametrize(
    ("reward", "direction", "words"),
    [
        (gain(0.4, 0.3, 0.5), "better", "Improved: reward +0.20 base std, 95 % interval +0.15 to +0.25"),
        (gain(-0.4, -0.5, -0.3), "worse", "Got worse: reward −0.20 base std"),
        (gain(0.1, -0.1, 0.3), "unclear", "No clear change: reward +0.05 base std"),
        (gain(0.4, 0.3, 0.5, num_pairs=3), "unclear", "Too few videos to tell"),
    ],
)
def test_the_verdict_says_whether_and_by_how_much(reward, direction, words):
    verdict = verdict_of(PairedComparison("before training", "after update 30", {"reward": reward}))
    assert verdict.direction == direction and verdict.headline.startswith(words)
    assert f"{reward.num_pairs} videos of the same prompts and seeds" in verdict.detail


def test_a_reward_that_rose_while_a_metric_fell_says_so():
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


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (gain(0.2, 0.1, 0.35), "The interval of other overlaps."),
        (gain(0.9, -0.1, 1.9), "The interval of other overlaps."),
        (None, "other cannot be compared."),
    ],
)
def test_no_run_wins_where_another_ones_interval_overlaps_with_its_or_is_not_known(other, why):
    verdict = verdict_of_runs({"sage": 8, "other": 4}, compared(gain(0.4, 0.3, 0.5), other), 4)
    assert (verdict.direction, verdict.headline) == ("unclear", "No run clearly gained most")
    assert verdict.detail.startswith("sage gained +0.20 base std, 95 % interval +0.15 to +0.25.")
    assert why in verdict.detail
