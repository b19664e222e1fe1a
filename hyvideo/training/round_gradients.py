"""The gradients of rounds that are not followed, or followed and undone, and how far they agree."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from hyvideo.algorithms.algorithm import Algorithm, Trajectory
from hyvideo.algorithms.grpo import GRPO
from hyvideo.algorithms.optimizer import Optimization, Step
from hyvideo.config.schema import Config
from hyvideo.distributed.collectives import average_gradients, gather, whole
from hyvideo.grpo.timesteps import Pairs

Gradient = dict[str, Tensor]
"""Gradient of every trained parameter by name, sharded as the parameter is."""


@dataclass(frozen=True)
class Agreement:
    """How far the gradients of independent rounds agree, for one denoising step or for all.

    Only their signs are compared. Adam follows signs rather than sizes, and a few large elements would hide the rest.

    Attributes:
        correlation: of two rounds' gradients, if both are normal: the share of signal in the variance of one.
        videos: of a round whose gradient holds as much signal as noise; infinite where no signal was seen.
    """

    correlation: float
    videos: float

    @classmethod
    def of(cls, products: Tensor, num_videos: float) -> "Agreement":
        """Measure it from the inner products `[R, R]` of the signs of R rounds' gradients, of `num_videos` each.

        Two normal variables of correlation c have a mean product of signs of ``2 / pi asin(c)``.
        """
        size, num_rounds = float(products.diagonal().mean()), len(products)
        between = float((products.sum() - products.diagonal().sum()) / (num_rounds * (num_rounds - 1)))
        correlation = math.sin(math.pi / 2 * between / size) if size > 0 else 0.0
        return cls(correlation, num_videos * (1 - correlation) / correlation if correlation > 0 else math.inf)


class GradientCollector(Optimization):
    """Adds the gradients of updates up instead of following them, so that an algorithm makes none."""

    def __init__(self, optimization: Optimization, config: Config) -> None:
        super().__init__(optimization.parameters, config.optimizer, sp_size=config.parallel.sp_size)
        self.collected: Gradient = {}

    def step(self, loss: float) -> Step:
        """Average the gradient over ranks, add it to what was collected, and skip the update."""
        average_gradients(self.parameters.values())
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.detach().clone()
                self.collected[name] = self.collected[name] + gradient if name in self.collected else gradient
                parameter.grad = None
        return Step(math.nan, 0.0, skipped=True)

    def pop(self, factor: float = 1.0) -> Gradient:
        """Return what was collected since the last time, times `factor`."""
        collected, self.collected = self.collected, {}
        return {name: gradient * factor for name, gradient in collected.items()}


class GradientFollower(Optimization):
    """Makes updates at one learning rate, and keeps the gradient of each as the optimizer saw it."""

    def __init__(self, optimization: Optimization, config: Config, rate: float) -> None:
        how = replace(config.optimizer, learning_rate=rate, lr_warmup_steps=0, weight_decay=0.0)
        super().__init__(optimization.parameters, how, sp_size=config.parallel.sp_size)
        self.gradients: list[Gradient] = []

    def step(self, loss: float) -> Step:
        """Keep the gradient, averaged over ranks and clipped, and follow it."""
        average_gradients(self.parameters.values())
        clip_grad_norm_(self.parameters.values(), self._config.max_grad_norm)
        self.gradients.append({n: p.grad.detach().clone() for n, p in self.parameters.items() if p.grad is not None})
        return super().step(loss)


def measure_agreement(
    algorithm: Algorithm, trajectories: Sequence[Trajectory], config: Config
) -> tuple[Agreement, dict[int, Agreement]]:
    """Compute the gradients of some rounds by the weights as they are, and how far they agree.

    Returns:
        The agreement in all, and that by denoising step: of GRPO, where every rank trains equally many videos at each
        step, for all ranks make each pass together.
    """
    num_videos, own = len(trajectories[0].scores.total), algorithm.optimization
    algorithm.optimization = collector = GradientCollector(own, config)
    totals: list[Gradient] = [{} for _ in trajectories]
    steps: dict[int, Agreement] = {}
    try:
        compared = [algorithm.compare(t) for t in trajectories] if isinstance(algorithm, GRPO) else []
        trained = [Pairs(*map(torch.cat, zip(*one.updates, strict=True))) for one in compared]
        counts = [torch.bincount(pairs.step_index, minlength=config.rollout.grpo_sampling_steps) for pairs in trained]
        if compared and len({tuple(map(tuple, one)) for one in gather([count.tolist() for count in counts])}) == 1:
            for step in range(config.rollout.grpo_sampling_steps):
                gradients: list[Gradient] = []
                for one, pairs, count in zip(compared, trained, counts, strict=True):
                    if count[step]:
                        chosen = pairs.step_index == step
                        here = Pairs(pairs.sample_index[chosen], pairs.step_index[chosen])
                        algorithm.update(one, here, 0.0, on_policy=True)
                    gradients.append(collector.pop(float(count[step] / count.sum())))
                if all(gradients):
                    share = sum(int(count[step]) for count in counts) / sum(map(len, trajectories))
                    steps[step] = Agreement.of(sign_products(gradients), share * num_videos)
                for total, gradient in zip(totals, gradients, strict=True):
                    add(total, gradient)
        else:
            for total, trajectory in zip(totals, trajectories, strict=True):
                for _ in algorithm.updates(trajectory):
                    pass
                add(total, collector.pop())
    finally:
        algorithm.optimization = own
    return Agreement.of(sign_products(totals), num_videos), steps


def add(total: Gradient, gradient: Gradient) -> None:
    """Add a gradient to a total that may lack some of its parameters, in place."""
    for name, value in gradient.items():
        total[name] = total[name].add_(value) if name in total else value


def sign_products(gradients: Sequence[Gradient]) -> Tensor:
    """Return the inner products of the signs of R gradients, over all parameters and ranks, `[R, R]` float64."""
    products = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for i, first in enumerate(gradients):
        for j, second in enumerate(gradients[: i + 1]):
            signs = [(first[name].sign(), second[name].sign()) for name in first if name in second]
            shared = [(one * other).sum(dtype=torch.float64) for one, other in signs]
            of_shards = [product for product in shared if isinstance(product, DTensor)]
            total = float(sum(product for product in shared if not isinstance(product, DTensor)))
            if of_shards:
                device = of_shards[0].device_mesh.device_type  # shards may rest in host memory
                total += float(whole(sum(of_shards).to(device)))
            products[i, j] = products[j, i] = total
    return products
