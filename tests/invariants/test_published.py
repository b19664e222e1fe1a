"""Each name in `published` takes the release's behaviour, and without it ours stays.

The first noises of a prompt, CRF 25 and the equalizer of cps are tested beside ours.
"""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from hyvideo.algorithms.grpo import anchor_kind
from hyvideo.algorithms.weights_copy import BaseModel, WeightsCopy
from hyvideo.config.schema import Config, ModelConfig, Published, RolloutConfig
from hyvideo.grpo.kl_controller import KLController
from hyvideo.models.reward_models.rewards import Scores
from tests.support.training import GradientRecorder, collect_round, weights_of


def test_the_config_file_names_every_behaviour():
    settings = yaml.safe_load(Path("configs/published.yaml").read_text())["rollout"]
    assert settings == {"published": list(settings["published"])} and {*settings["published"]} == {*get_args(Published)}


@pytest.mark.parametrize("published", [[], ["flow_kl"]], ids=str)
@pytest.mark.parametrize("sde_type", ["flow_grpo", "sage_grpo"])
def test_the_kl_of_flow_grpo_leaves_the_steps_size_out_of_its_variance(make_training, sde_type, published):
    training = make_training(sde_type=sde_type, eta=0.5, published=published or None)
    trajectory = collect_round(training)
    apart = replace(training.algorithm.compare(trajectory), anchor_means=trajectory.rollout.means + 0.1)
    found = training.algorithm.update(apart, apart.updates[0], 0.0, on_policy=True)["kl/position"]
    sigmas = training.policy.sigmas().double()
    step = training.policy.pipeline.scheduler.step_weights(sde_type=sde_type, eta=0.5)
    variance = step.std.double().square()
    if sde_type == "flow_grpo":
        high, low = sigmas[:-1], torch.where(sigmas[:-1] == 1, sigmas[1], sigmas[:-1])
        torch.testing.assert_close(variance, 0.25 * -sigmas.diff() * high / (1 - low), rtol=1e-5, atol=0)
        variance = 0.25 * high / (1 - low) if published else variance
    expected = (0.1**2 / (2 * (variance + 1e-6)))[apart.updates[0].step_index].mean()
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_lambda_warms_up_from_its_floor_and_follows_the_kl_from_the_last_update_of_the_warm_up_on():
    controller = KLController(max_coef=1.0, min_coef=0.2, start_coef=0.6, warmup_updates=12, target=0.1, published=True)
    assert controller.coefficient == 0.6
    risen = [controller.update(9.0) for _ in range(11)]
    assert risen == pytest.approx([0.2 + 0.8 * n / 12 for n in range(1, 12)])
    assert controller.update(9.0) == pytest.approx(0.9 * risen[-1])
    early = KLController(max_coef=1.0, min_coef=0.2, warmup_updates=2, target=0.1, published=True)
    assert [early.update(9.0) for _ in range(9)] == pytest.approx([0.6] * 9)  # not before there are ten values
    assert early.update(9.0) == pytest.approx(0.54)


@pytest.mark.parametrize(("published", "moves"), [(None, 1), (["kl_controller"], 8)])
def test_lambda_moves_with_every_micro_batch(make_training, published: list[str] | None, moves: int):
    training = make_training(published=published)  # 4 videos of 4 steps, two pairs at a time
    list(training.algorithm.updates(collect_round(training)))
    assert training.algorithm.controller.state_dict()["num_updates"] == moves


def test_an_adapters_anchor_never_moves(make_training):
    for name, kind, anchor in ((None, "copy", WeightsCopy), ("lora_anchor", "base", BaseModel)):
        given = [name] if name else []
        config = Config(ModelConfig(use_lora=True), rollout=RolloutConfig(published=given))
        assert anchor_kind(config) == kind
        training = make_training(use_lora=True, published=given or None)
        assert type(training.algorithm.anchor) is anchor
    assert anchor_kind(Config(rollout=RolloutConfig(published=["lora_anchor"]))) == "copy"
    for _ in range(2):  # the interval of refreshes
        list(training.algorithm.updates(collect_round(training)))
    assert not training.algorithm.anchor.equals_policy


@pytest.mark.parametrize("published", [None, ["muon_momentum"]], ids=str)
def test_weights_without_gradient_go_on_by_muons_momentum(make_training, published: list[str] | None):
    training = make_training(use_muon=True, weight_decay=0.0, published=published)
    optimization, moved = training.algorithm.optimization, []
    matrices = {name: p for name, p in optimization.parameters.items() if p.ndim > 1}
    for size in (1.0, 0.0):
        before = weights_of(training)
        for parameter in optimization.parameters.values():
            parameter.grad = torch.full_like(parameter, size)
        optimization.step(0.0)
        moved.append({name for name, p in matrices.items() if not torch.equal(p, before[name])})
    assert moved == [{*matrices}, {*matrices} if published else set()]


@pytest.mark.parametrize("published", [None, ["first_ratio"]], ids=str)
def test_the_first_update_follows_the_recorded_log_probabilities(make_training, published: list[str] | None):
    training = make_training(dual_kl_step_weight=1e3, kl_schedule="fixed", published=published)
    recorder, trajectory, gradients = GradientRecorder(training), collect_round(training), []
    for on_policy in (True, False):
        compared = replace(training.algorithm.compare(trajectory), anchor_means=trajectory.rollout.means)
        training.algorithm.update(compared, compared.updates[0], 1.0, on_policy=on_policy)
        gradients.append(recorder.gradient)
    assert torch.equal(*gradients) == bool(published)


@pytest.mark.parametrize("published", [None, ["idle_updates"]], ids=str)
def test_a_round_of_equal_rewards_makes_an_update(make_training, published: list[str] | None):
    training = make_training(published=published, weight_decay=0.5)
    trajectory, before = collect_round(training), weights_of(training)
    equal = torch.zeros_like(trajectory.scores.total)
    trajectory = replace(trajectory, scores=Scores({"VQ": equal}, equal, {"VQ": 1.0}))
    (metrics,) = training.algorithm.updates(trajectory)
    moved = any(not torch.equal(before[name], value) for name, value in weights_of(training).items())
    assert moved == bool(published) == (metrics["update/without_signal"] == 0)
