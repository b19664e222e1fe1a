"""Windows of noisy steps: where they lie, how they move, whose they are."""

import pytest
import torch

from hyvideo.grpo.sde_window import noisy_steps

ALL = torch.ones(5, dtype=torch.bool)


def windows(placement: str, size: int = 2, round_index: int = 0, stochastic: torch.Tensor = ALL, **changes) -> list:
    settings = {"num_samples": 4, "num_generations": 2, "interval": 3} | changes
    generator = torch.Generator().manual_seed(round_index)
    mask = noisy_steps(stochastic, placement, size, round_index=round_index, generator=generator, **settings)
    assert mask.dtype == torch.bool
    return [row.nonzero().flatten().tolist() for row in mask]


def test_without_a_window_every_step_that_can_be_noisy_is_and_a_window_counts_only_these():
    assert windows("all", size=9, stochastic=torch.tensor([False, True, True, True, False])) == [[1, 2, 3]] * 4
    stochastic = torch.tensor([False, True, True, False, True])
    assert windows("sliding", round_index=3, stochastic=stochastic) == [[2, 4]] * 4


def test_the_first_steps_stay_the_first():
    assert [windows("first", round_index=index)[0] for index in (0, 7, 100)] == [[0, 1]] * 3
    assert windows("first", size=5)[0] == [0, 1, 2, 3, 4]


def test_a_sliding_window_moves_at_its_interval_and_begins_again_after_the_last_steps():
    places = [windows("sliding", round_index=index)[0] for index in (0, 2, 3, 6, 9, 11, 12, 15)]
    assert places == [[0, 1], [0, 1], [1, 2], [2, 3], [3, 4], [3, 4], [0, 1], [1, 2]]


def test_a_group_shares_its_step_and_groups_and_rounds_draw_their_own():
    rounds = [windows("per_group", size=1, round_index=index, num_samples=40) for index in range(50)]
    for rows in rounds:
        assert all(rows[start] == rows[start + 1] for start in range(0, 40, 2))
    drawn = torch.tensor([rows[start][0] for rows in rounds for start in range(0, 40, 2)]).bincount(minlength=5)
    assert drawn.min() > 0.75 * 200  # each of five steps in 1000 draws
    assert rounds[0] != rounds[1]
    assert rounds[1] == windows("per_group", size=1, round_index=1, num_samples=40)


def test_a_rank_may_hold_a_part_of_one_group():
    assert windows("per_group", num_samples=2, num_generations=4)[0] == windows("per_group", num_samples=4)[0]


@pytest.mark.parametrize("size", [0, 6])
def test_a_window_that_does_not_fit_is_refused(size):
    with pytest.raises(ValueError, match=rf"sde_window_size must lie within \[1, 5\].*got {size}"):
        windows("sliding", size=size)
