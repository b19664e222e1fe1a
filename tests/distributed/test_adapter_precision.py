"""A float32 adapter in a bfloat16 network is sharded with it: gradients and updates are those of one process."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.network import build_inputs
from hyvideo.algorithms.optimizer import build_optimizers
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
        """Normalise in float32."""
        weight, bias = (None if part is None else part.float() for part in (self.weight, self.bias))
        return nn.functional.layer_norm(hidden.float(), self.normalized_shape, weight, bias, self.eps)


def update_adapter(num_ranks: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Take one backward pass and AdamW step of 1e-5; return gradient and change of every adapter weight."""
    with without_diffusers_logs():
        policy = install_attention(build_transformer().to(torch.bfloat16))
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
