"""Scores over ranks: how many videos of all ranks may fail."""

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hyvideo.config.schema import RewardConfig
from hyvideo.distributed.mesh import build_mesh
from hyvideo.models.reward_models.registry import RewardContext, RewardFailureError, Videos
from hyvideo.models.reward_models.rewards import RequestedReward, WeightedReward
from hyvideo.training.collect import score_over_ranks
from tests.support.ranks import run_on_ranks
from tests.support.rewards import Brightness, grey_videos


class Broken(Brightness):
    """The mean pixel; a prompt `raise` raises an error of the test."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        if "raise" in prompts:
            raise self._error
        return super().__call__(videos, prompts)


def failures(prompts_of_ranks: list[list[str]], max_failed: float, error: BaseException | None = None) -> int | str:
    """Score this rank's prompts; the failures of all ranks that were borne, or why they were not."""
    mesh = build_mesh()
    prompts = prompts_of_ranks[mesh.rank]
    choice = RequestedReward("brightness", 1.0, {"brightness": 2.0}, {}, None, "reward_model")
    model = Broken(error) if error else Brightness()
    reward = WeightedReward([choice], [model], RewardConfig(reward_max_failed=max_failed), RewardContext())
    before = sum(map(len, prompts_of_ranks[: mesh.rank]))
    positions = torch.arange(before, before + len(prompts))
    try:
        scores = score_over_ranks(reward, grey_videos(*range(len(prompts))), prompts, positions, mesh)
    except RewardFailureError as error:
        return str(error)
    return int(scores.total.isnan().sum())


@pytest.mark.parametrize(("max_failed", "borne"), [(0.0, False), (0.49, False), (0.5, True), (1.0, True)])
def test_more_failures_than_allowed_stop_the_run(max_failed: float, borne: bool):
    told = failures([["a", "fail"]], max_failed)
    if borne:
        assert told == 1
    else:
        assert told.startswith(f"1 of 2 videos could not be scored (brightness: 1); at most the share {max_failed:g}")


@pytest.mark.parametrize(("max_failed", "told"), [(0.5, 1), (0.3, "1 of 3 videos could not be scored (brightness: 1)")])
def test_failures_are_a_share_of_the_videos_of_all_ranks(max_failed: float, told: int | str):
    of_ranks = run_on_ranks(2, failures, [["fail"], ["a", "a"]], max_failed)
    assert len(set(of_ranks)) == 1
    assert of_ranks[0] == told or of_ranks[0].startswith(told)


ERRORS = [KeyError("VQ"), ValueError("no score"), OSError("the disk is full"), RuntimeError("broken")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_whatever_a_reward_raises_is_a_failure_of_the_reward(error: Exception):
    where = rf"\({__file__}, line \d+, in __call__\)"
    told = failures([["raise"]], 1.0, error)
    assert re.fullmatch(rf"the reward failed: {type(error).__name__}: {error} {where}", told)


def test_an_error_of_one_ranks_reward_is_raised_on_all():
    of_ranks = run_on_ranks(2, failures, [["a"], ["raise"]], 1.0, ERRORS[0])
    assert len(set(of_ranks)) == 1 and of_ranks[0].startswith("rank 1: the reward failed: KeyError: 'VQ' (")


def test_memory_that_runs_out_keeps_its_kind():
    with pytest.raises(torch.OutOfMemoryError):
        failures([["raise"]], 1.0, torch.OutOfMemoryError("CUDA out of memory"))
