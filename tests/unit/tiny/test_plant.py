"""Planted rewards: each prefers the video that has more of what it pays for."""

import torch

from hyvideo.models.reward_models.registry import RewardContext
from scripts.tiny.plant import KINDS, Planted
from tests.support.rewards import moving_square


def test_each_planted_reward_pays_for_its_own_look():
    moving, pale = moving_square(), moving_square(colour=(220, 200, 200))
    still = moving[:1].expand_as(moving)
    dark, blurred = moving // 2, (moving.float().roll(1, 2) + moving + moving.roll(-1, 2)).div(3).byte()
    videos = torch.stack([moving, pale, still, dark, blurred])
    scores = Planted(RewardContext())(videos, ["a prompt"] * len(videos))
    assert list(scores) == [kind for kind, (look, _) in KINDS.items() if look != "nothing"]
    moving, pale, still, dark, blurred = range(5)
    assert scores["brightness"].argmin() == dark
    assert scores["sharpness"][blurred] < scores["sharpness"][moving]
    assert scores["stillness"].argmax() == still
    assert scores["stillness"][pale].isclose(scores["stillness"][moving], atol=1e-4)  # pale is no slower
    assert Planted(RewardContext())(0 * videos[:1], ["lost"])["stillness"] < scores["stillness"][still]
    assert scores["saturation"].argmin() == pale
    assert scores["one_background"].argmax() == dark  # of which the white border became grey
