"""Muon against PyTorch's own, and which parameter goes to which optimizer."""

import pytest
import torch
from torch import nn

from hyvideo.algorithms.optimizer import Muon, build_optimizers, orthogonalize, set_learning_rate
from hyvideo.config.schema import OptimizerConfig


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(0)))


def step_with(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, seed: int) -> None:
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6), (1, 7), (64, 32)])
def test_muon_is_pytorchs_on_matrices(shape):
    ours, theirs = matrix(*shape), matrix(*shape)
    settings = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.95}
    optimizers = (
        (Muon([ours], iteration_dtype=torch.bfloat16, **settings), ours),
        (torch.optim.Muon([theirs], nesterov=True, adjust_lr_fn="match_rms_adamw", **settings), theirs),
    )
    for seed in range(1, 5):
        for optimizer, parameter in optimizers:
            step_with(optimizer, parameter, seed)
    assert not torch.allclose(ours, matrix(*shape))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_muon_treats_a_convolution_as_its_flattened_matrix():
    convolution, flat = matrix(8, 3, 1, 2, 2), matrix(8, 12)
    assert torch.equal(convolution.flatten(1), flat)
    for parameter in (convolution, flat):
        optimizer = Muon([parameter], lr=0.05, weight_decay=0.1)
        for seed in range(1, 4):
            parameter.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(seed)).view_as(parameter)
            optimizer.step()
    assert torch.equal(convolution.flatten(1), flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_orthogonalizing_pushes_all_singular_values_towards_1(shape, dtype):
    values = torch.linalg.svdvals(orthogonalize(matrix(*shape).detach() * 30, dtype=dtype))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_without_a_gradient_a_parameter_stays_and_a_zero_one_moves_nothing_but_by_decay():
    parameter = matrix(4, 4)
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(parameter, matrix(4, 4))
    parameter.grad = torch.zeros(4, 4)
    optimizer.step()
    assert torch.equal(parameter, matrix(4, 4) * (1 - 0.1 * 0.5))


def test_zero_gradients_after_one_that_is_not_take_no_step_and_let_the_momentum_fade():
    parameter = matrix(4, 6)
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.0)
    step_with(optimizer, parameter, seed=1)
    moved, momentum = parameter.detach().clone(), optimizer.state[parameter]["momentum_buffer"].clone()
    assert not torch.equal(moved, matrix(4, 6))
    for _ in range(3):
        parameter.grad = torch.zeros(4, 6)
        optimizer.step()
    assert torch.equal(parameter, moved)
    torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], 0.95**3 * momentum)


def test_muon_gets_the_matrices_and_adamw_the_rest():
    parameters = {"matrix": matrix(4, 3), "bias": matrix(4), "convolution": matrix(4, 3, 1, 1, 1)}
    muon, adamw = build_optimizers(parameters, OptimizerConfig(use_muon=True, learning_rate=0.2, weight_decay=0.3))
    assert isinstance(muon, Muon)
    assert muon.param_groups[0]["params"] == [parameters["matrix"], parameters["convolution"]]
    assert muon.param_groups[0]["momentum"] == 0.95
    assert adamw.param_groups[0]["params"] == [parameters["bias"]]
    assert adamw.param_groups[0]["betas"] == (0.95, 0.95)
    for optimizer in (muon, adamw):
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.2, 0.3)
    (muon,) = build_optimizers({"lora_A": matrix(4, 3)}, OptimizerConfig(use_muon=True))
    assert isinstance(muon, Muon)  # matrices alone need no AdamW


def test_without_muon_adamw_gets_everything():
    parameters = {"matrix": matrix(4, 3), "bias": matrix(4)}
    config = OptimizerConfig(use_muon=False, learning_rate=0.2, weight_decay=0.3)
    (adamw,) = build_optimizers(parameters, config)
    assert isinstance(adamw, torch.optim.AdamW)
    (group,) = adamw.param_groups
    assert group["params"] == list(parameters.values())
    assert (group["betas"], group["lr"], group["weight_decay"]) == ((0.9, 0.999), 0.2, 0.3)


def test_the_learning_rate_rises_linearly_and_stays_and_without_warm_up_is_full_at_once():
    config = OptimizerConfig(learning_rate=0.4, lr_warmup_steps=4, use_muon=True)
    optimizers = build_optimizers({"matrix": matrix(4, 3), "bias": matrix(4)}, config)
    rates = []
    for step in range(6):
        rates.append(set_learning_rate(optimizers, config, step))
        assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [rates[-1]] * 2
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert set_learning_rate([], OptimizerConfig(learning_rate=0.4, lr_warmup_steps=0), 0) == 0.4
