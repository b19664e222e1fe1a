"""Credit maps: which latent a pixel belongs to, what a usable map is, and which maps are refused."""

import pytest
import torch

from hyvideo.config.schema import RewardConfig
from hyvideo.models.reward_models.credit import checked_credit, credit_map
from hyvideo.models.reward_models.rewards import get_reward_fn
from tests.support.rewards import BRIGHTNESS, MAPPED

GRID = (3, 4, 6)


@pytest.mark.parametrize(
    ("frame", "latent_frame"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)], ids=lambda number: str(number)
)
def test_a_pixel_counts_for_its_latent_and_in_a_window_for_its_neighbours_in_the_frame(frame, latent_frame):
    saliency = torch.zeros(2, 9, 64, 96)
    saliency[0, frame, 2 * 16, 5 * 16 + 15] = 7.0
    found = credit_map(saliency, 9, GRID, window=3)
    assert found.shape == (2, *GRID) and torch.equal(found[1], torch.ones(GRID))
    torch.testing.assert_close(found.mean((1, 2, 3)), torch.ones(2))
    near, alone = torch.zeros(2, *GRID)
    near[latent_frame, 1:4, 4:6], alone[latent_frame, 2, 5] = 1, 72
    assert torch.equal(found[0] > 0, near > 0)
    torch.testing.assert_close(credit_map(saliency, 9, GRID)[0], alone)


def test_frames_that_were_not_shown_lie_on_the_line_between_their_neighbours():
    shown = torch.tensor([0.0, 4.0, 8.0]).view(1, 3, 1, 1).expand(1, 3, 64, 96)  # of frames 0, 4 and 8
    found = credit_map(shown, 9, GRID).mean((2, 3))[0]
    torch.testing.assert_close(found / found.sum(), torch.tensor([0.0, 2.5, 6.5]) / 9)
    assert torch.equal(credit_map(shown[:, :1], 1, (1, 4, 6)), torch.ones(1, 1, 4, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda good: good[:, 1:], r"credit map \[2, 3, 4, 6\].*gave \[2, 2, 4, 6\]"),
        (lambda good: good[0], r"gave \[3, 4, 6\]"),
        (lambda good: good + 0j, r"of real numbers.*gave \[2, 3, 4, 6\] torch.complex64"),
        (lambda good: None, "gave None"),
        (lambda good: 1 + 2 * (1 - good), "video 1 goes from -1 to 3 with mean 1"),
        (lambda good: good * 2, "video 0 goes from 2 to 2 with mean 2"),
        (lambda good: good / good.ceil(), "video 1 goes from nan to nan"),
        (lambda good: good / 0, "video 0 goes from inf to inf|video 0 .*inf"),
    ],
    ids=["frames", "videos", "complex", "nothing", "negative", "mean", "nan", "infinite"],
)
def test_a_map_that_is_not_usable_is_refused_with_its_numbers(change, message):
    good = torch.ones(2, *GRID)
    good[1, :, :2], good[1, :, 2:] = 0, 2
    nothing_failed = torch.zeros(2, dtype=torch.bool)
    assert torch.equal(checked_credit("mine", good, GRID, nothing_failed), good)
    with pytest.raises(ValueError, match=f"The reward mine must give.*{message}"):
        checked_credit("mine", change(good), GRID, nothing_failed)


def test_a_video_without_a_score_needs_no_map():
    found = checked_credit("mine", torch.full((2, *GRID), torch.nan), GRID, torch.ones(2, dtype=torch.bool))
    assert torch.equal(found, torch.ones(2, *GRID))


def config_of(name: str, **options: object) -> RewardConfig:
    models = {name: {"sub_reward": {"MQ": 1.0} if name == MAPPED else {"brightness": 1.0}, "options": options}}
    return RewardConfig(reward_config={"models": models}, reward_credit=name)


def test_a_reward_without_a_usable_map_or_without_any_is_refused_before_a_rollout():
    reward = get_reward_fn(config_of(MAPPED, kind="nan"))
    with pytest.raises(ValueError, match=f"The reward {MAPPED} must give"):
        reward.check_credit(9, (64, 96), GRID, ["a red circle moves slowly to the left"])
    with pytest.raises(ValueError, match=f"reward_credit: {BRIGHTNESS} gives no credit map"):
        get_reward_fn(config_of(BRIGHTNESS))
