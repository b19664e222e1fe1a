"""What each algorithm and its cheaper variants cost, in transformer evaluations per video and copies of the weights."""

import pytest

from hyvideo.algorithms.algorithm import Evaluations, algorithm_class
from hyvideo.config.loading import load_config

NFT = ["--algorithm", "nft"]
WINDOW = ["--sde_window", "first", "--sde_window_size"]
OWN = ["--algorithm", "tests.support.reward_weighted:RewardWeighted"]


@pytest.mark.parametrize(
    ("flags", "expected", "num_copies"),
    [
        ([], Evaluations(20, 20, 20), 1),
        (["--kl_weight", "0"], Evaluations(20, 0, 20), 0),
        (["--use_lora", "--use_moving_KL", "false"], Evaluations(20, 20, 20), 0),
        (["--timestep_fraction", "0.6"], Evaluations(20, 12, 12), 1),
        ([*WINDOW, "4"], Evaluations(20, 4, 4), 1),
        ([*WINDOW, "4", "--timestep_fraction", "0.5"], Evaluations(20, 2, 2), 1),
        (["--anchor_fraction", "0.25"], Evaluations(20, 5, 20), 1),
        ([*WINDOW, "1", "--anchor_fraction", "0.5"], Evaluations(20, 1, 1), 1),
        (["--sde_type", "cps"], Evaluations(20, 19, 19), 1),
        (NFT, Evaluations(20, 20, 20), 1),
        ([*NFT, "--timestep_fraction", "0.29"], Evaluations(20, 5, 5), 1),
        ([*NFT, "--algorithm_options", "kl_weight=1e-4", "--timestep_fraction", "0.5"], Evaluations(20, 20, 10), 2),
        ([*NFT, "--algorithm_options", "kl_weight=1e-4", "--use_lora"], Evaluations(20, 40, 20), 1),
        (OWN, Evaluations(20, 0, 20), 0),
    ],
    ids=str,
)
def test_every_step_is_sampled_once_and_trained_steps_cost_one_more_per_phase(flags, expected, num_copies):
    config = load_config(flags)
    algorithm = algorithm_class(config.grpo.algorithm)
    assert (algorithm.evaluations(config), algorithm.num_copies(config)) == (expected, num_copies)
