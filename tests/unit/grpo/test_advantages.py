"""Group-relative advantages."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyvideo.grpo.advantages import (
    gdpo_advantages,
    group_advantages,
    groups_without_spread,
    normalize_then_sum,
    parts_of_advantage,
)

NAN = math.nan


def by_hand(rewards: list[float], num_generations: int, clip_max: float) -> list[float]:
    advantages = []
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations]
        scored = [reward for reward in group if not math.isnan(reward)]
        mean, std = (statistics.fmean(scored), statistics.pstdev(scored)) if scored else (0.0, 0.0)
        for reward in group:
            advantage = 0.0 if math.isnan(reward) else (reward - mean) / max(std, 1e-6)
            advantages.append(max(-clip_max, min(clip_max, advantage)))
    return advantages


@st.composite
def grouped_rewards(draw):
    num_generations = draw(st.integers(1, 6))
    score = st.floats(-10, 10, width=32).map(lambda value: round(value, 3))
    item = st.one_of(score, st.just(NAN))
    size = num_generations * draw(st.integers(1, 4))
    return draw(st.lists(item, min_size=size, max_size=size)), num_generations


@given(grouped_rewards(), st.floats(0.5, 5))
@settings(deadline=None)
def test_advantages_equal_the_formula_computed_group_by_group(case, clip_max):
    rewards, num_generations = case
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), num_generations, clip_max)
    expected = torch.tensor(by_hand(rewards, num_generations, clip_max), dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reward", [0.1, 3.7, -1234.567])
def test_equal_float32_rewards_give_exactly_zero_whatever_their_size(reward):
    advantages = group_advantages(torch.full((21,), reward), 7)
    assert advantages.dtype == torch.float32 and advantages.tolist() == [0.0] * 21
    assert group_advantages(torch.eye(50)[0], 50)[0] == 5.0  # the largest, unless asked for


def test_advantages_may_be_divided_by_the_spread_of_all_rewards_or_by_nothing_and_groups_without_one_are_told():
    rewards = torch.tensor([1.0, 3.0, 10.0, 10.5, NAN, 2.0])
    spread = statistics.pstdev([1.0, 3.0, 10.0, 10.5, 2.0])
    centred = [-1.0, 1.0, -0.25, 0.25, 0.0, 0.0]
    assert group_advantages(rewards, 2, divisor="none").tolist() == centred
    received = group_advantages(rewards, 2, divisor="global").tolist()
    assert received == pytest.approx([value / spread for value in centred])
    assert group_advantages(torch.ones(4), 2, divisor="global").tolist() == [0.0] * 4
    rewards = torch.tensor([1.0, 1.0, 1.0, 2.0, NAN, 3.0, NAN, NAN])
    assert groups_without_spread(rewards, 2).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("rewards", "num_generations", "clip_max", "message"),
    [
        (torch.ones(6), 4, 5.0, r"multiple of num_generations=4.*\(6,\)"),
        (torch.ones(2, 3), 3, 5.0, r"\(2, 3\)"),
        (torch.tensor([1.0, math.inf]), 2, 5.0, "finite, or NaN"),
        (torch.ones(2), 2, 0.0, "adv_clip_max must be positive .* got 0.0"),
    ],
)
def test_rewards_that_form_no_groups_are_refused(rewards, num_generations, clip_max, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, num_generations, clip_max)


def test_normalised_metrics_are_summed_free_of_their_scales_and_one_without_spread_adds_nothing():
    large, small = torch.tensor([0.0, 1000.0, 5.0, 5.0]), torch.tensor([0.2, 0.0, 0.1, 0.3])
    rewards = normalize_then_sum({"large": large, "small": small, "unused": small}, {"large": 1.0, "small": 0.5}, 2)
    assert rewards.tolist() == pytest.approx([-1 + 0.5, 1 - 0.5, -0.5, 0.5])
    rewards = normalize_then_sum({"a": torch.ones(2), "b": torch.tensor([1.0, 2.0])}, {"a": 9.0, "b": 1.0}, 2)
    assert rewards.tolist() == [-1, 1]
    metrics = {"a": torch.tensor([1.0, 2.0, 9.0]), "b": torch.tensor([1.0, 3.0, NAN])}
    rewards = normalize_then_sum(metrics, {"a": 1.0, "b": 1.0}, 3)  # what failed in one metric is left out of all
    assert rewards[:2].tolist() == pytest.approx([-2, 2]) and rewards[2].isnan()
    assert group_advantages(rewards, 3).tolist() == pytest.approx([-1, 1, 0])


def test_gdpo_divides_by_the_spread_of_the_round_so_that_contradicting_metrics_weigh_less():
    agree, contradict = [0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 5.0, -3.0]
    metrics = {"a": torch.tensor(agree), "b": torch.tensor(contradict)}
    weights = {"a": 1.0, "b": 0.5}
    sums = torch.tensor([-1.5, 1.5, -0.5, 0.5])
    expected = (sums / sums.std(correction=0)).tolist()
    assert gdpo_advantages(metrics, weights, 2).tolist() == pytest.approx(expected)
    assert gdpo_advantages(metrics, weights, 2, clip_max=0.3).tolist() == pytest.approx([-0.3, 0.3, -0.3, 0.3])
    assert group_advantages(normalize_then_sum(metrics, weights, 2), 2).tolist() == pytest.approx([-1, 1, -1, 1])
    with pytest.raises(ValueError, match="multiple of num_generations=3"):
        gdpo_advantages(metrics, weights, 3)


@pytest.mark.parametrize("normalized", [False, True])
def test_the_shares_of_the_advantage_add_up_and_name_the_metric_that_decides(normalized):
    draw = torch.Generator().manual_seed(0)
    large, small = 100 * torch.randn(8, generator=draw), torch.randn(8, generator=draw)
    small[3] = torch.nan  # a video without a score takes no part
    parts = parts_of_advantage({"large": large, "small": small}, {"large": 1.0, "small": 1.0}, 4, normalized=normalized)
    assert parts["large"].share + parts["small"].share == pytest.approx(1)
    assert (parts["large"].share > 0.98) == (not normalized)
    kept = [0, 1, 2, 4, 5, 6, 7]
    within = large[kept].split([3, 4])
    spread = (sum(float(group.var(correction=0)) for group in within) / 2) ** 0.5
    assert parts["large"].spread == pytest.approx(spread, rel=1e-5)


def test_a_contradicting_metric_has_a_negative_correlation_and_share_and_a_constant_one_no_part():
    up = torch.tensor([0.0, 1.0, 2.0, 3.0])
    metrics, weights = {"up": up, "down": -0.5 * up, "flat": torch.ones(4)}, {"up": 1.0, "down": 1.0, "flat": 1.0}
    parts = parts_of_advantage(metrics, weights, 4, normalized=False)
    assert [parts[name].share for name in weights] == pytest.approx([2, -1, 0])
    assert [parts[name].correlation for name in ("up", "down")] == pytest.approx([-1, -1])
    assert parts["flat"].spread == 0 and math.isnan(parts["flat"].correlation)
