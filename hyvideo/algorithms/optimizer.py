"""The optimizer side of an update: AdamW, or Muon for matrices with AdamW for the rest, and one step over all ranks."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from hyvideo.algorithms.weights_copy import WeightsCopy
from hyvideo.config.schema import OptimizerConfig
from hyvideo.data.host_reads import host_read
from hyvideo.distributed.collectives import average_gradients, local_shard, own_part, whole

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """Muon, with which HunyuanVideo-1.5 was trained: momentum, then the update's singular values pushed to about 1.

    Any parameter with at least two dims is a matrix `[d0, rest]`. The step is `lr * 0.2 sqrt(max(d0, d1))`, the
    size of an AdamW step; weight decay is decoupled. `torch.optim.Muon` does the same for 2-D parameters only.

    A weight whose whole gradient is zero takes no step, and its momentum fades. Every Muon step has the same size, so
    otherwise one prompt with a quoted text would move the glyph embedder in all later updates that have none.

    Of a sharded parameter each rank keeps its shard of the momentum. The direction is gathered, every rank iterates on
    the whole matrix and keeps the rows of its shard: the same update as on one process. Per update each of n ranks
    receives `(n - 1) / n` of all matrices once, in bf16 half of what a forward pass gathers in float32.

    The Newton-Schulz iteration has `iteration_dtype`. None takes bf16, but on a CPU float32: a CPU without bf16
    instructions multiplies such matrices about fifty times slower. With `always_steps` a weight whose gradient is zero
    goes on by its momentum, as in the release.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        iteration_dtype: torch.dtype | None = None,
        always_steps: bool = False,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._iteration_dtype, self._always_steps = iteration_dtype, always_steps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                # A mesh's device computes, also where `offload` keeps its shards in host memory.
                sharded = isinstance(parameter, DTensor)
                device = torch.device(parameter.device_mesh.device_type) if sharded else parameter.device
                dtype = self._iteration_dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
                direction = parameter.grad.lerp(buffer, group["momentum"]).to(device, dtype)
                matrix = whole(direction).flatten(1)
                if not self._always_steps:
                    matrix.mul_(whole((parameter.grad != 0).sum().to(device)) > 0)  # not read by the host
                update = orthogonalize(matrix, dtype=dtype).to(parameter.dtype).view(parameter.shape)
                size = group["lr"] * 0.2 * max(matrix.shape) ** 0.5
                shard = local_shard(parameter)
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.add_(own_part(parameter, update).to(shard.device), alpha=-size)


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


def build_optimizers(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, *, always_steps: bool = False
) -> list[Optimizer]:
    """Return the optimizers of `parameters`: AdamW, or Muon for matrices and AdamW for the rest (`use_muon`)."""
    matrices = [p for p in parameters.values() if config.use_muon and p.ndim >= 2]
    rest = [p for p in parameters.values() if not (config.use_muon and p.ndim >= 2)]
    shared = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, always_steps=always_steps, **shared))
    if rest:
        betas = (0.95, 0.95) if config.use_muon else (0.9, 0.999)
        optimizers.append(AdamW(rest, betas=betas, fused=True, **shared))
    return optimizers


@dataclass(frozen=True)
class Step:
    """What one optimizer step did.

    Attributes:
        grad_norm: norm of the gradient before clipping.
        skipped: whether no weight was changed, because loss or gradient is not finite.
        without_signal: whether no weight was changed, because there was nothing to learn from.
    """

    grad_norm: float
    learning_rate: float
    skipped: bool
    without_signal: bool = False

    @property
    def made(self) -> bool:
        """Whether the weights were changed."""
        return not (self.skipped or self.without_signal)

    def metrics(self) -> dict[str, float]:
        """Return the step's numbers by their names in `metrics.jsonl`."""
        numbers = {"grad_norm": self.grad_norm, "lr": self.learning_rate, "update/skipped": float(self.skipped)}
        return numbers | {"update/without_signal": float(self.without_signal)}


class NonFiniteUpdateError(RuntimeError):
    """Loss or gradient is not finite; the policy was left as it was before the update."""


class Optimization:
    """The trained parameters and their optimizers: gradients of all ranks, clipping, warm-up and the step itself.

    Args:
        parameters: the trained ones, by name.
        sp_size: ranks that share a video.
        max_skipped: updates in a row that may be skipped because they are not finite.
        ema: average of the trained weights, which follows every update; None: there is none.
        always_steps: of `Muon`.

    Attributes:
        updates: number of updates made so far, skipped ones included; `--max_steps` counts them.
        skipped_in_row: updates skipped since the last one that was made.
        rate_scale: factor of the learning rate; below 1 after a rollback.

    Example:
        >>> optimization.backward(loss_of_first_half, weight=0.5)
        >>> optimization.backward(loss_of_second_half, weight=0.5)
        >>> optimization.step(loss=0.31).grad_norm
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        sp_size: int = 1,
        max_skipped: int = 0,
        ema: WeightsCopy | None = None,
        always_steps: bool = False,
    ) -> None:
        self.parameters = dict(parameters)
        self.optimizers = build_optimizers(parameters, config, always_steps=always_steps)
        self.updates = 0
        self.ema = ema
        self._config = config
        self._sp_size = sp_size
        self._max_skipped = max_skipped
        self.skipped_in_row = 0
        self.rate_scale = 1.0

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add the gradients of a micro-batch whose loss counts `weight` of this rank's part of the update."""
        # Gradients are averaged over all ranks, but those of ranks that share a video add up to the true one.
        (loss * (weight * self._sp_size)).backward()

    def step(self, loss: float, *, signal: bool = True) -> Step:
        """Make the update; every rank calls it, with the same mean loss, to see whether it is finite.

        Without `signal` the update is counted, but weights, moments and average stay: what is left of the gradient is
        rounding and the trust region, and Muon would make a step of ordinary length of them. Where no more updates may
        be skipped, all ranks raise a NonFiniteUpdateError, and no weight was changed.
        """
        parameters = self.parameters.values()
        rate = set_learning_rate(self.optimizers, self._config, self.updates, self.rate_scale)
        average_gradients(parameters)
        norm = whole(nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm))
        with host_read("the gradient's norm, once per update: an update that is not finite is not made"):
            norm = float(norm)
        skipped = not (math.isfinite(norm) and math.isfinite(loss))
        if skipped and self.skipped_in_row >= self._max_skipped:
            after = f" after {self.skipped_in_row} skipped in a row" if self.skipped_in_row else ""
            raise NonFiniteUpdateError(
                f"Update {self.updates + 1}{after}: loss {loss}, gradient norm {norm}: not finite, the update was not "
                "made."
            )
        if not skipped and signal:
            for optimizer in self.optimizers:
                optimizer.step()
            if self.ema:
                n = self.updates + 1  # the ramp, which Flow-GRPO and diffusers have too, soon forgets the beginning
                self.ema.refresh(min(self._config.ema_decay, (1 + n) / (10 + n)))
        self._zero_grad()
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
        self.updates += 1
        return Step(norm, rate, skipped, without_signal=not (skipped or signal))

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def set_learning_rate(optimizers: Iterable[Optimizer], config: OptimizerConfig, step: int, scale: float = 1.0) -> float:
    """Set and return the learning rate of update `step` (0 is the first): linear warm-up, then constant; by `scale`."""
    warmup = scale * (min(1.0, (step + 1) / config.lr_warmup_steps) if config.lr_warmup_steps else 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * warmup
    return config.learning_rate * warmup
