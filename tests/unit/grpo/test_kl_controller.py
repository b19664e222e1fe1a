"""The schedules of the KL coefficient, step by step."""

import math

import pytest

from hyvideo.grpo.kl_controller import MILDER_CEILING, KLController


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
