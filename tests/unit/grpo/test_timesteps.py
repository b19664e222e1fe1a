"""Where windows of noisy steps lie, which steps are trained, and how they are dealt to a round's updates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyvideo.grpo.timesteps import noisy_steps, select_timesteps, split_updates

ALL = torch.ones(5, dtype=torch.bool)


def windows(placement: str, size: int = 2, round_index: int = 0, stochastic: torch.Tensor = ALL, **changes) -> list:
    settings = {"num_samples": 4, "num_generations": 2, "interval": 3} | changes
    generator = torch.Generator().manual_seed(round_index)
    mask = noisy_steps(stochastic, placement, size, round_index=round_index, generator=generator, **settings)
    assert mask.dtype == torch.bool
    return [row.nonzero().flatten().tolist() for row in mask]


def test_a_window_counts_only_steps_that_can_be_noisy_stays_at_the_first_or_slides_at_its_interval_and_begins_again():
    assert windows("all", size=9, stochastic=torch.tensor([False, True, True, True, False])) == [[1, 2, 3]] * 4
    stochastic = torch.tensor([False, True, True, False, True])
    assert windows("sliding", round_index=3, stochastic=stochastic) == [[2, 4]] * 4
    assert [windows("first", round_index=index)[0] for index in (0, 7, 100)] == [[0, 1]] * 3
    assert windows("first", size=5)[0] == [0, 1, 2, 3, 4]
    places = [windows("sliding", round_index=index)[0] for index in (0, 2, 3, 6, 9, 11, 12, 15)]
    assert places == [[0, 1], [0, 1], [1, 2], [2, 3], [3, 4], [3, 4], [0, 1], [1, 2]]


def test_a_group_shares_its_step_and_groups_and_rounds_draw_their_own():
    rounds = [windows("per_group", size=1, round_index=index, num_samples=40) for index in range(50)]
    for rows in rounds:
        assert all(rows[start] == rows[start + 1] for start in range(0, 40, 2))
    drawn = torch.tensor([rows[start][0] for rows in rounds for start in range(0, 40, 2)]).bincount(minlength=5)
    assert drawn.min() > 0.75 * 200  # each of five steps in 1000 draws
    assert rounds[0] != rounds[1] and rounds[1] == windows("per_group", size=1, round_index=1, num_samples=40)
    part = windows("per_group", num_samples=2, num_generations=4)  # what a rank may hold of a group
    assert part[0] == windows("per_group", num_samples=4)[0]


CPS_MASK = torch.tensor([True] * 9 + [False])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_without_permutation_samples_use_the_noisiest_trained_steps_in_order_each_of_its_own_where_they_differ():
    mask = torch.tensor([False, True, True, True, True, False])
    assert select_timesteps(mask, 0.5, 3, permute=False, generator=seeded()).tolist() == [[1, 2]] * 3
    masks = torch.tensor([[True, True, False, False], [False, False, True, True]])
    assert select_timesteps(masks, 1.0, 2, permute=False, generator=seeded()).tolist() == [[0, 1], [2, 3]]
    assert select_timesteps(masks, 0.5, 2, permute=True, generator=seeded()).shape == (2, 1)
    rounded_down = {(20, 1.0): 20, (20, 0.5): 10, (20, 0.99): 19, (19, 0.5): 9, (20, 0.01): 1, (100, 0.29): 29}
    for (trained, fraction), kept in {**rounded_down, (3, 1 / 3): 1}.items():
        mask = torch.ones(trained, dtype=torch.bool)
        assert select_timesteps(mask, fraction, 1, permute=False, generator=seeded()).shape == (1, kept)


def test_with_permutation_each_sample_has_its_own_order_of_distinct_trained_steps():
    steps = select_timesteps(CPS_MASK, 1.0, 50, permute=True, generator=seeded())
    assert torch.equal(steps.sort(dim=1).values, torch.arange(9).repeat(50, 1))
    assert len({tuple(row) for row in steps.tolist()}) > 45
    steps = select_timesteps(CPS_MASK, 0.5, 4000, permute=True, generator=seeded())
    assert steps.shape == (4000, 4)
    counts = steps.flatten().bincount(minlength=10)
    assert counts[9] == 0 and counts[:9].min() > 0.93 * 4000 * 4 / 9  # every step equally often
    chosen = [select_timesteps(CPS_MASK, 0.6, 8, permute=True, generator=seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0], chosen[2])


def test_a_window_out_of_range_a_schedule_without_noise_and_too_many_updates_are_refused():
    for size in (0, 6):
        with pytest.raises(ValueError, match=rf"sde_window_size must lie within \[1, 5\].*got {size}"):
            windows("sliding", size=size)
    with pytest.raises(ValueError, match="none of the 4 denoising steps is stochastic.*eta > 0"):
        select_timesteps(torch.zeros(4, dtype=torch.bool), 1.0, 1, permute=True, generator=seeded())
    with pytest.raises(ValueError, match=r"within \[1, 6\].*2 samples x 3 steps.*got 7"):
        split_updates(torch.zeros(2, 3, dtype=torch.long), 7, num_generations=2)


@given(groups=st.integers(1, 4), size=st.integers(1, 4), num_steps=st.integers(1, 9), data=st.data())
@settings(deadline=None)
def test_every_pair_is_trained_once_and_updates_see_samples_and_groups_evenly(groups, size, num_steps, data):
    num_samples = groups * size
    num_updates = data.draw(st.integers(1, num_samples * num_steps))
    mask = torch.ones(num_steps, dtype=torch.bool)
    steps = select_timesteps(mask, 1.0, num_samples, permute=True, generator=seeded(num_updates))
    updates = split_updates(steps, num_updates, num_generations=size)
    pairs = [pair for update in updates for pair in zip(*(index.tolist() for index in update), strict=True)]
    assert sorted(pairs) == [(sample, step) for sample in range(num_samples) for step in range(num_steps)]
    sizes = [len(update.sample_index) for update in updates]
    assert len(updates) == num_updates and max(sizes) - min(sizes) <= 1
    for update in updates:
        per_sample = update.sample_index.bincount(minlength=num_samples)
        for counts in (per_sample, per_sample.reshape(groups, size).sum(dim=1)):
            assert counts.max() - counts.min() <= 1


def test_steps_that_divide_evenly_give_each_update_all_samples_and_parts_of_groups_are_seen_equally_often():
    steps = select_timesteps(torch.ones(6, dtype=torch.bool), 1.0, 4, permute=True, generator=seeded())
    updates = split_updates(steps, 3, num_generations=2)
    for number, update in enumerate(updates):
        assert update.sample_index.tolist() == [0, 1, 2, 3] * 2  # the rollout's order: equal micro-batches
        for sample in range(4):
            used = update.step_index[update.sample_index == sample]
            assert used.tolist() == steps[sample, 2 * number : 2 * number + 2].tolist()
    (update,) = split_updates(torch.tensor([[1, 0], [0, 1]]), 1, num_generations=8)
    assert sorted(zip(*(index.tolist() for index in update), strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    updates = split_updates(torch.zeros(6, 1, dtype=torch.long), 3, num_generations=4)  # three rollouts of half a group
    assert [sorted((update.sample_index // 2).tolist()) for update in updates] == [[0, 1], [0, 2], [1, 2]]
