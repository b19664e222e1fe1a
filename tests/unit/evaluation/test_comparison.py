"""Comparing models: means, paired gains and win rates in their closed forms, and the tables that show them."""

import json
import math

import numpy as np
import pytest
from pydantic_core import to_json

from hyvideo.evaluation.comparison import compare, with_overall
from scripts.reports.markdown import markdown_of

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
    assert (gain.mean, gain.low, gain.high) == (0.5, 0.5, 0.5)
    assert list(comparison.gains) == ["trained"]
    rate = comparison.win_rates["TA"]["trained"]["base"]
    assert rate.mean == 1.0 and 0.3 < rate.low < 0.5 and rate.high == 1.0


def test_win_rates_count_ties_half_and_mirror_each_other():
    comparison = compare({"base": BASE, "trained": scores(1.0, 2.0, 5.0, 5.0, 0.0, 0.0)}, ROWS)
    forth, back = comparison.win_rates["TA"]["trained"]["base"], comparison.win_rates["TA"]["base"]["trained"]
    assert forth.mean == pytest.approx((0.75 + 1 + 0) / 3)
    assert back.mean == pytest.approx(1 - forth.mean)
    assert (back.low, back.high) == (pytest.approx(1 - forth.high), pytest.approx(1 - forth.low))


def test_a_pair_with_a_failed_score_is_left_out_of_gain_and_win_rate():
    failed = BASE["TA"] + 1.0
    failed[:2] = math.nan
    comparison = compare({"base": BASE, "trained": {"TA": failed}}, ROWS)
    assert comparison.gains["trained"]["TA"].num == 2
    assert comparison.win_rates["TA"]["trained"]["base"].num == 2


def test_overall_is_the_weighted_sum_that_fails_with_its_parts_and_does_without_what_judges_no_such_prompt():
    nan, weights = math.nan, {"VQ": 0.5, "TA": 1.0}
    parts = {"VQ": np.array([1.0, nan, nan, nan]), "TA": np.array([2.0, 3.0, 4.0, nan])}
    judged = {"VQ": np.array([True, True, False, False]), "TA": np.array([True, True, True, False])}
    judged["Overall"] = judged["VQ"] | judged["TA"]
    found = with_overall(parts, weights, judged)
    assert list(found) == ["Overall", "VQ", "TA"]
    np.testing.assert_array_equal(found["Overall"], [2.5, nan, 4.0, nan])
    assert compare({"base": found}, np.arange(4), judged).num_failed["base"] == {"Overall": 1, "VQ": 1, "TA": 0}


def test_the_table_has_a_row_per_model_and_the_json_everything():
    comparison = compare({"base": BASE, "trained": scores(1.0, 2.0, 5.0, 5.0, 0.0, 0.0)}, ROWS)
    lines = markdown_of(comparison).splitlines()
    assert lines[0].startswith("3 prompts, 6 videos of each model.") and "No score failed." in lines[0]
    assert lines[2:5] == ["| model | TA |", "| --- | --- |", f"| base | {comparison.means['base']['TA']} |"]
    rate = comparison.win_rates["TA"]["trained"]["base"]
    assert f"| trained | 0.58 [{rate.low:.2f}, {rate.high:.2f}] |  |" in lines
    assert json.loads(to_json(comparison))["means"]["base"]["TA"]["mean"] == pytest.approx(2.0)


def test_a_metric_that_failed_altogether_leaves_the_rest_of_the_table():
    nothing = scores(*[math.nan] * 6)
    half = scores(1.0, 2.0, math.nan, math.nan, math.nan, math.nan)
    comparison = compare({"base": BASE, "broken": nothing, "half": half}, ROWS)
    table = markdown_of(comparison)
    assert "| broken | none scored |" in table and "| half | +1.500 [no interval from 1] |" in table
    assert json.loads(to_json(comparison, inf_nan_mode="null"))["means"]["broken"]["TA"]["mean"] is None
