"""A reward named by its import path scores like a registered one; what cannot be one is refused before it is loaded."""

import pytest
import torch

from hyvideo.config.schema import RewardConfig
from hyvideo.models.reward_models.rewards import check_rewards, get_reward_fn
from tests.support.rewards import grey_videos

PATH = "tests.support.rewards:Brightness"


def test_a_reward_of_ones_own_scores_by_its_import_path():
    reward = get_reward_fn(RewardConfig(reward_model=PATH, reward_weights={"brightness": 2.0}))
    scores = reward(grey_videos(10, 30), ["a", "b"])
    assert torch.equal(scores.total, torch.tensor([20.0, 60.0]))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.support.rewards:Missing", "cannot be imported.*module:Class"),
        ("no_such_module:Reward", "cannot be imported"),
        ("pathlib:Path", "must be a subclass of hyvideo.models.reward_models.registry.RewardModel"),
        ("brightnes", "expected one of .*, or module:Class of your own"),
    ],
)
def test_what_is_no_reward_is_refused_without_loading_anything(path: str, message: str):
    config = RewardConfig(reward_model=path, reward_weights={"brightness": 1.0})
    with pytest.raises(ValueError, match=message):
        check_rewards(config, "ckpts", 24)
