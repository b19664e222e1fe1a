"""Credit maps in training: a uniform one changes no bit, another one does, and all that holds for runs holds for it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hyvideo.models.parallelize import trainable_parameters
from hyvideo.models.reward_models.remote.server import create_app
from hyvideo.training.run import Training
from tests.support.equal_runs import assert_identical, rows_of
from tests.support.reward_server import serving
from tests.support.rewards import BRIGHTNESS, Mapped, with_map
from tests.support.training import ALGORITHMS, arguments, collect_round, training_of

TWO_UPDATES = {"updates_per_rollout": 2, "kl_weight": 1.0}
METHODS = {
    "sage_grpo, two updates of two rounds": {**TWO_UPDATES, "max_steps": 4},
    "flow_grpo, accumulated, anchor on the fly": {
        "sde_type": "flow_grpo",
        "kl_compute_mode": "training_phase",
        "gradient_accumulation_steps": 2,
    },
    "dance_grpo, adapter, windows": {
        "sde_type": "dance_grpo",
        "use_lora": True,
        "use_moving_KL": False,
        "sde_window": "per_group",
        "sde_window_size": 2,
    },
    "cps, normalized ratio, without the equalizer": {
        "sde_type": "cps",
        "ratio_norm": True,
        "use_grad_balancing": False,
        **TWO_UPDATES,
    },
    "nft": ALGORITHMS["nft"],
}


Trained = Callable[..., tuple[list[dict[str, float]], Tensor]]


@pytest.fixture
def trained(make_training: Callable[..., Training]) -> Trained:
    """Train with the given settings: its rows, and its weights."""

    def train(**settings: object) -> tuple[list[dict[str, float]], Tensor]:
        training = make_training(**{"max_steps": 2, **settings})
        training.train()
        rows = rows_of(training.run.folder.path)
        parameters = trainable_parameters(training.policy.transformer).values()
        return rows, torch.cat([parameter.detach().flatten() for parameter in parameters])

    return train


@pytest.mark.parametrize("method", METHODS)
def test_a_uniform_map_changes_no_bit_and_another_one_does(trained: Trained, method: str):
    none, uniform, own = (trained(**METHODS[method], **with_map(kind)) for kind in ("none", "uniform", "own"))
    assert uniform[0] == [{**row, "reward/credit_focus": 1.0} for row in none[0]] and torch.equal(uniform[1], none[1])
    assert own[0][0]["reward/mean"] == none[0][0]["reward/mean"]  # the videos of the first round are the same
    assert not torch.equal(own[1], none[1])


def test_it_matters_where_a_map_is_high(trained: Trained):
    own, shuffled = (trained(max_steps=1, **with_map(kind)) for kind in ("own", "shuffled"))
    assert own[0][0]["reward/credit_focus"] == shuffled[0][0]["reward/credit_focus"] > 1.01
    assert not torch.equal(own[1], shuffled[1])


def test_a_weighted_replay_gives_what_the_rollout_recorded(make_training: Callable[..., Training]):
    training = make_training(**with_map("own"), updates_per_rollout=2, rollout_micro_batch_size=2)
    trajectory = collect_round(training)
    compared = training.algorithm.compare(trajectory)
    parts = [part for pairs in compared.updates for part in pairs.micro_batches(2)]  # composed as the rollout's
    losses = [training.algorithm._loss(compared, part, 0.1, False) for part in parts]
    assert compared.credit.shape == (4, 1, 2, 2, 2) and compared.credit.std() > 0.01
    assert {float(numbers["ratio/max_deviation"]) for _, numbers in losses} == {0.0}
    assert {float(numbers["kl/velocity"].detach()) for _, numbers in losses} == {0.0}


def test_maps_travel_over_the_reward_server_and_the_run_is_the_same(trained: Trained):
    how = {"reward_model": "mapped", "reward_credit": "mapped", "reward_batch_size": 3, "reward_async": True}
    here = trained(**with_map("own"), reward_batch_size=3)
    with serving(create_app({"mapped": Mapped()})) as url:
        there = trained(**how, remote_reward_url=url)
    assert there[0] == here[0] and torch.equal(there[1], here[1])


def test_a_resumed_run_is_the_uninterrupted_one(tiny_root: Path, prompts_csv: Path, tmp_path: Path):
    settings = {**with_map("own"), **TWO_UPDATES, "max_steps": 4, "save_interval": 2}
    for name, changes in (
        ("whole", {}),
        ("parts", {"max_steps": 2}),
        ("parts", {"resume_from_checkpoint": "latest"}),
    ):
        training_of(arguments(tiny_root, prompts_csv, tmp_path / name, **settings | changes)).train()
    assert_identical(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (with_map("nan"), "must give credit maps of finite values"),
        (with_map("shape"), r"must give a credit map \[1, 2, 2, 2\]"),
        ({"reward_credit": "clip_score"}, "reward_credit is 'clip_score', which does not score: name one of moving_sh"),
        (
            {"reward_model": BRIGHTNESS, "reward_weights": '{"brightness": 1.0}', "reward_credit": BRIGHTNESS},
            "gives no credit map",
        ),
        (
            {"algorithm": "tests.support.reward_weighted:RewardWeighted", "reward_credit": "moving_shapes"},
            "weights all parts of a video alike",
        ),
    ],
)
def test_a_map_that_cannot_be_used_is_refused_before_a_rollout(make_training, settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_training(**settings)
