"""Sharded weights are updated as those of one process: a float32 adapter of a bfloat16 network, and Muon's matrices."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.network import build_inputs
from hyvideo.algorithms.optimizer import Muon, build_optimizers
from hyvideo.config.schema import OptimizerConfig
from hyvideo.distributed.collectives import whole
from hyvideo.models.adapter import without_diffusers_logs
from hyvideo.models.attention import install_attention
from hyvideo.models.parallelize import prepare_policy, shard_weights, trainable_parameters
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import ADAPTER, build_transformer, randomize


class Float32LayerNorm(nn.LayerNorm):
    """A layer norm as autocast computes it on a GPU; on the CPU it leaves layer norms as they come."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = (None if part is None else part.float() for part in (self.weight, self.bias))
        return nn.functional.layer_norm(hidden.float(), self.normalized_shape, weight, bias, self.eps)


def update_adapter(num_ranks: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Take one backward pass and AdamW step of 1e-5; return gradient and change of every adapter weight."""
    with without_diffusers_logs():
        policy = install_attention(build_transformer(num_attention_heads=4).to(torch.bfloat16))
    for module in policy.modules():
        if isinstance(module, nn.LayerNorm):
            module.__class__ = Float32LayerNorm
    prepare_policy(policy, gradient_checkpointing=True, lora=ADAPTER)
    randomize(policy)
    if num_ranks > 1:
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("shard",))
        shard_weights(policy, mesh, compute_dtype=torch.bfloat16)
    parameters = trainable_parameters(policy)
    before = {name: whole(p.detach()).clone() for name, p in parameters.items()}
    with torch.autocast("cpu", torch.bfloat16):
        output = policy(**build_inputs(policy, (2, 2, 2), [5]))[0]
        output.float().square().mean().backward()
    (optimizer,) = build_optimizers(parameters, OptimizerConfig(use_muon=False, learning_rate=1e-5, weight_decay=0.0))
    gradients = {name: whole(p.grad).clone() for name, p in parameters.items()}
    optimizer.step()
    after = {name: whole(p.detach()) for name, p in parameters.items()}
    return {name: (gradients[name].numpy(), (after[name] - before[name]).numpy()) for name in parameters}


def test_ranks_update_a_float32_adapter_of_a_bfloat16_network_as_one_process_does():
    alone, received = update_adapter(1), run_on_ranks(2, update_adapter, 2)[0]
    assert received.keys() == alone.keys()
    assert any(name.startswith("context_embedder") for name in alone)  # weights that are gathered outside of blocks
    for name, (gradient, change) in received.items():
        expected, _ = alone[name]
        assert gradient.dtype == change.dtype == np.float32
        assert np.linalg.norm(gradient - expected) <= 0.02 * np.linalg.norm(expected), name
        assert (change != 0).all(), name


def moves(num_ranks: int) -> list[list[list[float]]]:
    """Take Muon's step of a whole gradient, one whose gradient is zero but in the first row, and one of zeros."""
    start, *gradients = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0))  # two rows and one
    gradients[1][1:] = 0
    gradients[2].zero_()
    mesh = init_device_mesh("cpu", (num_ranks,)) if num_ranks > 1 else None

    def placed(tensor: Tensor) -> Tensor:
        """Shard a tensor over the ranks, if there are several."""
        return tensor.clone() if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    parameter, moved = nn.Parameter(placed(start)), []
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.0)
    for gradient in gradients:
        before = whole(parameter.detach()).clone()
        parameter.grad = placed(gradient)
        optimizer.step()
        moved.append((whole(parameter.detach()) - before).tolist())
    return moved


def test_a_matrix_moves_when_any_ranks_part_of_its_gradient_is_not_zero_and_rests_when_all_are():
    expected = torch.tensor(moves(1))
    assert (expected[1] != 0).all()  # rows without a gradient of their own have momentum
    assert not expected[2].any()
    for received in run_on_ranks(2, moves, 2):
        torch.testing.assert_close(torch.tensor(received), expected, rtol=1e-5, atol=1e-6)
