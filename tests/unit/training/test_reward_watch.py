"""A reward that rises alone is warned of; one that rises honestly, or stays, is not."""

import random
import re
from collections.abc import Iterator

import pytest

from hyvideo.training.guard import HALF, RewardWatch

ROUNDS = 2 * HALF


def rows(reward: float, valid: float, diversity: float) -> Iterator[dict[str, float]]:
    """Rounds in which each metric moves by so much in all, with noise on the reward; every tenth is validated."""
    noise = random.Random(0)
    for number in range(ROUNDS):
        share = number / (ROUNDS - 1)
        row = {"reward/mean": reward * share + noise.gauss(0, 0.2), "rollout/diversity": 0.1 + diversity * share}
        yield row | ({"valid/reward": 0.5 + valid * share} if number % 10 == 9 else {})


def warnings(**moves: float) -> list[str]:
    watch = RewardWatch()
    return [warning for row in rows(**moves) if (warning := watch.observe(row))]


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        ({"reward": 1.0, "valid": -0.5, "diversity": 0.0}, r"but valid/reward fell from \+0\.3"),
        ({"reward": 1.0, "valid": 0.2, "diversity": -0.08}, r"but rollout/diversity fell from 0\.08\d+ to 0\.03\d+:"),
        ({"reward": 1.0, "valid": -0.5, "diversity": -0.08}, "valid/reward fell .* and rollout/diversity fell"),
    ],
)
def test_a_rise_at_the_cost_of_something_is_told_once_with_its_numbers(moves: dict[str, float], said: str):
    (warning,) = warnings(**moves)
    assert "reward/mean rose from" in warning
    assert re.search(said, warning)


@pytest.mark.parametrize(
    "moves",
    [
        {"reward": 1.0, "valid": 0.5, "diversity": 0.0},
        {"reward": 0.0, "valid": -0.5, "diversity": -0.08},
        {"reward": -1.0, "valid": -0.5, "diversity": -0.08},
    ],
)
def test_an_honest_rise_and_no_rise_are_not(moves: dict[str, float]):
    assert warnings(**moves) == []


def test_a_validation_of_the_rounds_is_compared_with_the_one_before_them():
    watch, noise = RewardWatch(), random.Random(0)
    said = []
    for number in range(1, 201):
        row = {"reward/mean": number / 10 + noise.gauss(0, 0.2), "rollout/diversity": 0.1}
        valid = {100: {"valid/reward": 0.5}, 200: {"valid/reward": 0.1}}.get(number, {})
        if warning := watch.observe(row | valid):
            said.append((number, warning))
    ((number, warning),) = said
    assert number == 200 and "valid/reward fell from +0.5000 to +0.1000" in warning
