"""The cost of the method and its cheaper variants, in transformer evaluations per video."""

import pytest

from hyvideo.planning.evaluations import Evaluations, evaluations_per_video


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Evaluations(20, 20, 20)),
        ({"with_anchor": False}, Evaluations(20, 0, 20)),
        ({"timestep_fraction": 0.6}, Evaluations(20, 12, 12)),
        ({"window_size": 4}, Evaluations(20, 4, 4)),
        ({"window_size": 4, "timestep_fraction": 0.5}, Evaluations(20, 2, 2)),
        ({"window_size": 1}, Evaluations(20, 1, 1)),
        ({"anchor_fraction": 0.25}, Evaluations(20, 5, 20)),
        ({"anchor_fraction": 0.5, "window_size": 1}, Evaluations(20, 1, 1)),
    ],
    ids=str,
)
def test_every_step_is_sampled_once_and_trained_steps_cost_one_more_per_phase(settings, expected):
    assert evaluations_per_video(20, 20, **settings) == expected


def test_a_deterministic_step_is_sampled_but_not_trained():
    assert evaluations_per_video(20, 19) == Evaluations(20, 19, 19)
