"""Where and when videos are scored changes no result; failed scores stop a run or teach nothing, as configured."""

import json
import math

import pytest
import torch

from hyvideo.models.parallelize import trainable_parameters
from hyvideo.models.reward_models.moving_shapes import MovingShapesReward
from hyvideo.models.reward_models.registry import RewardContext, RewardFailureError
from hyvideo.models.reward_models.remote.server import create_app
from hyvideo.models.reward_models.text_rendering import TextRendering
from tests.support.equal_runs import rows_of
from tests.support.reward_server import Faulty, requests_limited, serving


@pytest.fixture
def outcome(trained):
    """Train with the given settings: its rows and one of its weights."""

    def train(**settings: object) -> tuple[list[dict[str, float]], torch.Tensor]:
        training = trained(**{"max_steps": 2, "rollout_micro_batch_size": 1, **settings})
        return rows_of(training.folder.path), trainable_parameters(training.policy.transformer)["proj_out.weight"]

    return train


def test_overlapped_and_remote_scoring_give_the_same_run(outcome):
    """With two rewards, one of which scores only the videos of a prompt that quotes a text."""
    reading = {"num_frames": 1, "threads": 1}
    served = {"moving_shapes": MovingShapesReward(), "text_rendering": TextRendering(RewardContext(), **reading)}
    sums = {"moving_shapes": {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}, "text_rendering": {"TEXT": 1.0}}
    remote = {"models": {name: {"sub_reward": weights} for name, weights in sums.items()}}
    here = {"models": remote["models"] | {"text_rendering": {"sub_reward": {"TEXT": 1.0}, "options": reading}}}
    plain = outcome(reward_batch_size=3, reward_config=json.dumps(here))
    with serving(create_app(served)) as url:
        others = [
            outcome(reward_batch_size=3, reward_config=json.dumps(here), reward_async=True),
            outcome(reward_batch_size=3, reward_config=json.dumps(remote), reward_async=True, remote_reward_url=url),
        ]
    assert {row["reward/TEXT"] is None for row in plain[0]} == {False, True}
    for rows, weight in others:
        assert rows == plain[0] and torch.equal(weight, plain[1])


def test_normalised_metrics_change_what_is_learnt_and_not_what_is_logged(outcome):
    # Groups of four: of two, one is better whatever the scale.
    group = {"num_generations": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    ways = ("sum", "normalize_then_sum", "gdpo")
    (plain, weight), *others = (outcome(**group, reward_aggregation=how) for how in ways)
    for rows, other in others:
        assert plain[0]["reward/mean"] == rows[0]["reward/mean"] and not torch.equal(weight, other)
    assert not torch.equal(others[0][1], others[1][1])
    two, _ = outcome(**group, reward_weights='{"VQ": 1, "TA": 1}')
    for row, names in ((plain[0], ("VQ", "MQ", "TA")), (two[0], ("VQ", "TA"))):
        assert sum(row[f"mixing/share_{name}"] for name in names) == pytest.approx(1)


def test_a_run_goes_on_without_the_scores_that_failed_or_stops_as_configured(make_training):
    app = Faulty(create_app({"moving_shapes": MovingShapesReward()}), ["ok", "500", "500", "500", "500", "500"])
    settings = {"reward_batch_size": 2, "save_interval": 1}
    with serving(app) as url, requests_limited(retries=0, in_flight=1):
        lenient = make_training(remote_reward_url=url, reward_max_failed=1.0, max_steps=2, **settings)
        lenient.train()
        half, none = rows_of(lenient.folder.path)
        strict = make_training(remote_reward_url=url, max_steps=2, **settings)
        before = trainable_parameters(strict.policy.transformer)["proj_out.weight"].clone()
        with pytest.raises(RewardFailureError, match="4 of 4 videos could not be scored"):
            strict.train()
    assert half["reward/failed"] == 2 and math.isfinite(half["reward/mean"]) and half["grad_norm"] > 0
    assert none["reward/failed"] == 4 and none["reward/mean"] is None and none["reward/groups_without_spread"] == 2
    assert strict.state.step == 0
    assert torch.equal(trainable_parameters(strict.policy.transformer)["proj_out.weight"], before)


def test_an_offloaded_reward_is_asked_back_in_every_round(make_training, monkeypatch):
    devices = []
    monkeypatch.setattr(MovingShapesReward, "to", lambda self, device: devices.append(str(device)))
    make_training(max_steps=2, reward_offload=True, reward_async=True).train()
    assert devices == ["cpu"] * 5  # when it is built; then to the device, here the CPU, and back in two rounds
