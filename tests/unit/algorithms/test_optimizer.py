"""Muon against PyTorch's own, the optimizers of a run, and the average of the trained weights."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from generate import parse_arguments
from hyvideo.algorithms.optimizer import Muon, build_optimizers, set_learning_rate
from hyvideo.checkpoint.trained_policy import load_trained_policy
from hyvideo.config.schema import OptimizerConfig
from hyvideo.evaluation.generate import request_of
from hyvideo.models.loading import load_transformer
from hyvideo.training.run import Run
from scripts.evaluate import main as evaluate
from scripts.export import main as export
from tests.support.equal_runs import rows_of
from tests.support.training import weights_of


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(0)))


def step_with(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, seed: int) -> None:
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6), (1, 7), (64, 32), (8, 3, 1, 2, 2)])
def test_muon_is_pytorchs_on_matrices_and_treats_a_convolution_as_its_flattened_matrix(shape):
    ours, theirs = matrix(*shape), matrix(shape[0], math.prod(shape[1:]))
    settings = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.95}
    muon = Muon([ours], iteration_dtype=torch.bfloat16, **settings)
    reference = torch.optim.Muon([theirs], nesterov=True, adjust_lr_fn="match_rms_adamw", **settings)
    for seed in range(1, 5):
        step_with(muon, ours, seed)
        step_with(reference, theirs, seed)
    assert not torch.allclose(ours, matrix(*shape))
    torch.testing.assert_close(ours.flatten(1), theirs, rtol=1e-6, atol=1e-6)


def test_without_a_gradient_a_parameter_stays_and_zero_ones_move_nothing_but_by_decay_and_let_the_momentum_fade():
    parameter = matrix(4, 6)
    decaying, optimizer = (Muon([parameter], lr=0.1, weight_decay=decay) for decay in (0.5, 0.0))
    decaying.step()
    assert torch.equal(parameter, matrix(4, 6))
    parameter.grad = torch.zeros(4, 6)
    decaying.step()
    assert torch.equal(parameter, matrix(4, 6) * (1 - 0.1 * 0.5))
    step_with(optimizer, parameter, seed=1)
    moved, momentum = parameter.detach().clone(), optimizer.state[parameter]["momentum_buffer"].clone()
    assert not torch.allclose(moved, matrix(4, 6) * (1 - 0.1 * 0.5))
    for _ in range(3):
        parameter.grad = torch.zeros(4, 6)
        optimizer.step()
    assert torch.equal(parameter, moved)
    torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], 0.95**3 * momentum)


def test_muon_gets_the_matrices_and_adamw_the_rest_or_everything_and_the_rate_rises_linearly_and_stays():
    parameters = {"matrix": matrix(4, 3), "bias": matrix(4), "convolution": matrix(4, 3, 1, 1, 1)}
    config = OptimizerConfig(use_muon=True, learning_rate=0.2, weight_decay=0.3)
    muon, adamw = build_optimizers(parameters, config)
    (alone,) = build_optimizers(parameters, replace(config, use_muon=False))
    expected = [(muon, Muon, ["matrix", "convolution"]), (adamw, torch.optim.AdamW, ["bias"])]
    for optimizer, kind, names in [*expected, (alone, torch.optim.AdamW, parameters)]:
        (group,) = optimizer.param_groups
        assert isinstance(optimizer, kind) and group["params"] == [parameters[name] for name in names]
        assert (group["lr"], group["weight_decay"]) == (0.2, 0.3)
    assert muon.param_groups[0]["momentum"] == 0.95
    assert (adamw.param_groups[0]["betas"], alone.param_groups[0]["betas"]) == ((0.95, 0.95), (0.9, 0.999))
    (muon,) = build_optimizers({"lora_A": matrix(4, 3)}, config)
    assert isinstance(muon, Muon)  # matrices alone need no AdamW
    config = OptimizerConfig(learning_rate=0.4, lr_warmup_steps=4, use_muon=True)
    optimizers = build_optimizers({"matrix": matrix(4, 3), "bias": matrix(4)}, config)
    for step, rate in enumerate([0.1, 0.2, 0.3, 0.4, 0.4, 0.4]):
        assert set_learning_rate(optimizers, config, step) == pytest.approx(rate)
        assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == pytest.approx([rate, rate])
    assert set_learning_rate([], replace(config, lr_warmup_steps=0), 0) == 0.4


def train(make_training, **settings: Any) -> tuple[Run, list[dict[str, Tensor]]]:
    """The training, the weights that it began with, and those after each update."""
    training = make_training(**settings)
    weights, log = [weights_of(training)], training.log
    training.log = lambda *args: (weights.append(weights_of(training)), log(*args))
    training.train()
    return training, weights


@pytest.mark.parametrize("settings", [{}, {"ema_offload": True, "use_lora": True}], ids=["full", "adapter, offloaded"])
def test_it_is_the_average_with_its_ramp_and_the_training_does_not_see_it(make_training, settings):
    training, (average, *updates) = train(make_training, ema_decay=0.26, **settings)
    for decay, weights in zip((2 / 11, 3 / 12, 0.26), updates, strict=True):
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in average}
    torch.testing.assert_close(training.state.optimization.ema.state_dict(), average)
    plain, (_, *others) = train(make_training, **settings)
    assert rows_of(plain.folder.path) == rows_of(training.folder.path)
    assert all(torch.equal(others[-1][name], weights[name]) for name in weights)


def test_a_skipped_update_leaves_it(make_training):
    training = make_training(ema_decay=0.5, max_skipped_updates=3)
    optimization = training.state.optimization
    before = {name: weight.clone() for name, weight in optimization.ema.state_dict().items()}
    for parameter in optimization.parameters.values():
        parameter.data += 1
        parameter.grad = torch.zeros_like(parameter)
    for norm, skipped in ((float("nan"), True), (0.0, False)):
        assert optimization.step(norm).skipped == skipped
        after = optimization.ema.state_dict()
        assert all(torch.equal(weight, before[name]) for name, weight in after.items()) == skipped


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "adapter"])
def test_a_checkpoint_gives_policy_or_average_and_validation_takes_the_average(trained, tiny_root, use_lora):
    settings = {"ema_decay": 0.5, "use_lora": use_lora, "max_steps": 2, "save_interval": 2, "validation_interval": 2}
    training = trained(**settings)
    optimization = training.state.optimization
    state = {False: weights_of(training), True: dict(optimization.ema.state_dict())}
    for ema, expected in state.items():
        transformer = load_transformer(tiny_root, dtype=torch.float32)
        load_trained_policy(transformer, training.folder.checkpoints / "step_2", ema=ema)
        loaded = dict(transformer.named_parameters())
        assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    assert any(not torch.equal(state[True][name], state[False][name]) for name in state[True])
    validated = rows_of(training.folder.path)[-1]["valid/reward"]
    with optimization.ema.in_place_of_policy():
        sampled = training.validation.sample(training.validation.prompts)
    assert validated == float(sampled.scores.total.nanmean())


def test_a_checkpoint_without_an_average_is_refused(trained, tiny_root, prompts_csv, tmp_path, capsys):
    training = trained(max_steps=1)
    checkpoint = str(training.folder.checkpoints / "step_1")
    model = ["--model_path", str(tiny_root), "--ema", "--output_path", str(tmp_path / "made.mp4")]
    with pytest.raises(ValueError, match="step_1' has no average of the weights: only runs with ema_decay"):
        request_of(parse_arguments([*model, "--prompt", "a red circle", "--checkpoint_path", checkpoint]))
    with pytest.raises(ValueError, match="--ema takes the average in a checkpoint: give --checkpoint_path"):
        request_of(parse_arguments([*model, "--prompt", "a red circle"]))
    assert export([*model, "--format", "diffusers", "--checkpoint_path", checkpoint]) == 2
    told = ["--prompts_csv", str(prompts_csv), "--output_dir", str(tmp_path / "evaluated"), "--ema", "trained"]
    assert evaluate([*told, "--model", "trained", str(tiny_root), checkpoint]) == 2
    assert evaluate([*told, "--model", "base", str(tiny_root)]) == 2
    error = capsys.readouterr().err
    assert error.count("has no average of the weights") == 2 and "--ema trained: there is no --model of that" in error
