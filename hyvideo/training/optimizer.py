"""Optimizers of the policy: AdamW, or Muon for matrices with AdamW for the rest."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from hyvideo.config.schema import OptimizerConfig
from hyvideo.distributed.collectives import local_shard, own_part, whole

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """Muon, with which HunyuanVideo-1.5 was trained: momentum, then the update's singular values pushed to about 1.

    Any parameter with at least two dims is a matrix `[d0, rest]`. The step is `lr * 0.2 sqrt(max(d0, d1))`, the
    size of an AdamW step; weight decay is decoupled. `torch.optim.Muon` does the same for 2-D parameters only.

    Of a sharded parameter each rank keeps its shard of the momentum. Its direction is gathered in `iteration_dtype`,
    every rank iterates on the whole matrix and keeps the rows of its shard: the same update as on one process. Per
    update each of n ranks receives `(n - 1) / n` of all matrices once, in bf16 half of what a forward pass gathers in
    float32.

    Args:
        parameters: matrices.
        lr: learning rate, as for AdamW.
        weight_decay: decoupled weight decay.
        momentum: Nesterov momentum.
        iteration_dtype: dtype of the Newton-Schulz iteration.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        iteration_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.iteration_dtype = iteration_dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient; `closure` is not supported."""
        if closure is not None:
            raise ValueError("Muon.step takes no closure.")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(buffer, group["momentum"]).to(
                    _device_of(parameter), self.iteration_dtype
                )
                matrix = whole(direction).flatten(1)
                update = orthogonalize(matrix, dtype=self.iteration_dtype).to(parameter.dtype).view(parameter.shape)
                size = group["lr"] * 0.2 * max(matrix.shape) ** 0.5
                shard = local_shard(parameter)
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.add_(own_part(parameter, update).to(shard.device), alpha=-size)


def _device_of(parameter: Tensor) -> str | torch.device:
    """The device that computes with a parameter: not that of its shard, where `cpu_offload` keeps it in host memory."""
    return parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device


def orthogonalize(matrix: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return `matrix` `[m, n]` with its singular values pushed towards 1 (5 quintic Newton-Schulz iterations)."""
    a, b, c = NEWTON_SCHULZ
    transposed = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if transposed else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if transposed else x).to(matrix.dtype)


def build_optimizers(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> list[Optimizer]:
    """Return the optimizers of `parameters`: AdamW, or Muon for matrices and AdamW for the rest (`use_muon`)."""
    matrices = [p for p in parameters.values() if config.use_muon and p.ndim >= 2]
    rest = [p for p in parameters.values() if not (config.use_muon and p.ndim >= 2)]
    shared = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, **shared))
    if rest:
        betas = (0.95, 0.95) if config.use_muon else (0.9, 0.999)
        optimizers.append(AdamW(rest, betas=betas, fused=True, **shared))
    return optimizers


def set_learning_rate(optimizers: Iterable[Optimizer], config: OptimizerConfig, step: int) -> float:
    """Set and return the learning rate of update `step` (0 is the first): linear warm-up, then constant."""
    warmup = min(1.0, (step + 1) / config.lr_warmup_steps) if config.lr_warmup_steps else 1.0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * warmup
    return config.learning_rate * warmup
