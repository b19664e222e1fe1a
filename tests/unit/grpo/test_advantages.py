"""Group-relative advantages, and how lambda follows the KL."""

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
from hyvideo.grpo.kl_controller import MILDER_CEILING, KLController

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


def coefficients(controller: KLController, observed: list[float]) -> list[float]:
    return [controller.update(kl) for kl in observed]


@pytest.mark.parametrize(("start", "line"), [(None, [0.2, 0.4, 0.6, 0.8, 1.0]), (0.6, [0.6, 0.7, 0.8, 0.9, 1.0])])
def test_the_warm_up_is_a_straight_line_from_floor_or_start_to_ceiling_whatever_the_kl(start, line):
    controller = KLController(max_coef=1.0, min_coef=0.2, start_coef=start, warmup_updates=4, target=0.1)
    assert controller.coefficient == line[0]
    assert coefficients(controller, [9.0, 0.0, 9.0, 0.0]) == pytest.approx(line[1:])
    assert min(coefficients(controller, [9.0] * 30)) == 0.2
    assert KLController(max_coef=1.0, min_coef=1.0, start_coef=1.0).coefficient == 1.0


def test_the_paper_defaults_reach_the_ceiling_after_a_hundred_updates_which_is_also_the_target():
    assert KLController(max_coef=3e-4).target == 3e-4
    values = coefficients(KLController(), [1e-5] * 100)
    assert values[49] == pytest.approx(5.05e-6) and values[98] < values[99] == pytest.approx(1e-5)


def test_a_large_kl_relaxes_and_a_small_kl_tightens_within_floor_and_ceiling():
    controller = KLController(max_coef=1.0, min_coef=0.7, warmup_updates=0, target=0.1)
    assert controller.coefficient == 1.0
    assert coefficients(controller, [0.16] * 4) == pytest.approx([0.9, 0.81, 0.729, 0.7])
    assert coefficients(controller, [0.06] * 10)[-1] == pytest.approx(0.7)
    assert coefficients(controller, [-0.4, 0.04, 0.04, 0.04]) == pytest.approx([0.77, 0.847, 0.9317, 1.0])
    at_the_bounds = KLController(max_coef=1.0, min_coef=0.0, warmup_updates=0, target=0.5)
    assert coefficients(at_the_bounds, [0.76, 0.74, -0.75]) == [0.9, 0.9, 0.9]  # means 0.76, 0.75 and 0.25


def test_the_controller_reacts_to_the_mean_of_the_last_ten_values():
    controller = KLController(max_coef=1.0, min_coef=0.0, warmup_updates=10, target=0.1)
    assert coefficients(controller, [0.1] * 10)[-1] == 1.0
    assert controller.update(0.61) == pytest.approx(0.9)  # mean 0.151
    assert controller.update(0.05) == pytest.approx(0.9)  # mean 0.146
    assert coefficients(controller, [0.1] * 8)[-1] == pytest.approx(0.9)
    assert controller.update(0.1) == pytest.approx(0.9)  # 0.61 has left the window: mean 0.095
    assert coefficients(controller, [0.0] * 4)[-1] == pytest.approx(0.9)  # mean 0.06
    assert controller.update(-0.2) == pytest.approx(0.99)  # mean 0.03, below half the target


def test_fixed_never_moves_and_milder_is_the_two_stage_schedule_under_a_lower_ceiling():
    controller = KLController(schedule="fixed", max_coef=2e-5, warmup_updates=5)
    assert {controller.coefficient, *coefficients(controller, [0.0, 100.0] * 10)} == {2e-5}
    assert KLController(schedule="fixed", max_coef=1e-9, start_coef=1.0).coefficient == 1e-9  # needs no floor or start
    observed = [1e-3 * (7 * i % 5) for i in range(40)]
    settings = {"min_coef": 1e-6, "warmup_updates": 6, "target": 2e-3}
    milder = KLController(schedule="milder", max_coef=1e-3, **settings)
    two_stage = KLController(schedule="two_stage", max_coef=1e-3 * MILDER_CEILING, **settings)
    assert coefficients(milder, observed) == coefficients(two_stage, observed)
    assert milder.ceiling == pytest.approx(1e-4)


@pytest.mark.parametrize("updates_before", [0, 1, 3, 8, 25])
def test_a_restored_controller_goes_on_as_if_never_interrupted(updates_before):
    observed = [0.05 * (3 * i % 7) for i in range(50)]
    whole, first, resumed = (KLController(max_coef=1.0, min_coef=0.1, warmup_updates=2, target=0.1) for _ in range(3))
    expected = coefficients(whole, observed)
    coefficients(first, observed[:updates_before])
    coefficients(resumed, [0.3] * 9)
    resumed.load_state_dict(first.state_dict())
    assert resumed.coefficient == first.coefficient
    assert coefficients(resumed, observed[updates_before:]) == expected[updates_before:]


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_an_error_and_changes_nothing(kl):
    controller = KLController(warmup_updates=3)
    controller.update(0.1)
    before = controller.state_dict()
    with pytest.raises(ValueError, match=f"KL of update 2 is {kl}"):
        controller.update(kl)
    assert controller.state_dict() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cosine"}, "two_stage, fixed, milder, got 'cosine'"),
        ({"max_coef": 0.0}, "kl_weight.* must be positive, got 0.0"),
        ({"max_coef": 1e-5, "min_coef": 1e-4}, "kl_min_coef.*got 0.0001"),
        ({"schedule": "milder", "max_coef": 1e-5, "min_coef": 5e-6}, "kl_min_coef.*'milder', got 5e-06"),
        *(({"start_coef": start}, rf"kl_coef.* \[1e-07, 1e-05\] .*got {start}") for start in (1e-8, 1e-4)),
        ({"warmup_updates": -1}, "kl_warmup_updates must be at least 0, got -1"),
        ({"target": 0.0}, "kl_target.* got 0.0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        KLController(**settings)


def test_a_state_of_other_bounds_keeps_to_the_new_ones_and_a_foreign_one_is_refused():
    for new in ({"max_coef": 1e-3, "schedule": "fixed"}, {"max_coef": 1e-6, "warmup_updates": 0}):
        controller = KLController(**new)
        controller.load_state_dict(KLController(**new | {"max_coef": 1e-5}).state_dict())
        assert controller.coefficient == new["max_coef"]
    with pytest.raises(ValueError, match=r"keys \['coefficient', 'num_updates', 'recent'\], got \['lambda'\]"):
        KLController().load_state_dict({"lambda": 1.0})
