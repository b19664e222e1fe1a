"""Seeds are functions of what they are for, and noise does not depend on what was drawn before."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hyvideo.data.randomness import generator_for, seed_for

PARTS = st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4)


def test_seeds_are_pinned_so_that_runs_repeat_in_other_processes_and_versions_of_this_code():
    assert seed_for(42, "rollout/step", 3, 1, 0, 7) == 7993142405297209457
    assert seed_for() == 8238016292129134938


@given(PARTS, PARTS)
@example([1, "a"], ["1", "a"])
@example(["1a"], ["1", "a"])
@example(["1", "a", ""], ["1", "a"])
@example(["1;a"], ["1", "a"])
def test_different_parts_have_different_seeds_that_fit_a_torch_generator(one, other):
    assert (seed_for(*one) == seed_for(*other)) == (one == other) and 0 <= seed_for(*one) < 2**63
    torch.Generator().manual_seed(seed_for(*one))


ADDRESS = {"seed": 42, "stream": "rollout", "round": 3, "prompt": 1, "generation": 0, "step": 7}


def test_equal_addresses_draw_equal_noise_whatever_was_drawn_between():
    state = torch.get_rng_state()
    first = torch.randn(8, generator=generator_for(**ADDRESS))
    assert torch.equal(state, torch.get_rng_state())
    torch.randn(100)
    assert torch.equal(first, torch.randn(8, generator=generator_for(**ADDRESS)))
    assert generator_for(42, "timesteps", 3).initial_seed() == seed_for(42, "timesteps", 3, 0, 0, 0)


def test_every_part_of_the_address_changes_the_noise_and_that_of_neighbours_is_uncorrelated():
    others = [ADDRESS | {name: ADDRESS[name] + ("x" if name == "stream" else 1)} for name in ADDRESS]
    drawn = [torch.randn(8, generator=generator_for(**address)) for address in (ADDRESS, *others)]
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:])
    generators = [generator_for(42, "rollout", 0, 0, 0, step) for step in range(40)]
    noise = torch.stack([torch.randn(4000, generator=generator) for generator in generators])
    correlation = torch.corrcoef(noise) - torch.eye(40)
    assert correlation.abs().max() < 0.08  # 5 sigma of 1 / sqrt(4000)
    assert abs(noise.mean()) < 0.0125 and abs(noise.std() - 1) < 0.01
