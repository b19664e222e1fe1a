"""Which denoising steps of a rollout draw noise: all, or a window of them with the ODE around it.

Noise outside the trained steps only blurs what a score says about them, and steps without noise need no replay.
Sources: MixGRPO (arXiv 2507.21802) for the window that slides from the first steps to the last, Flash-GRPO (arXiv
2605.15980) for one step per prompt group (iso-temporal groups): videos that are compared are noised at the same step.
"""

from typing import Literal

import torch
from torch import Tensor

Placement = Literal["all", "first", "sliding", "per_group"]


def noisy_steps(
    stochastic: Tensor,
    placement: Placement,
    size: int,
    *,
    num_samples: int,
    num_generations: int,
    round_index: int,
    interval: int,
    generator: torch.Generator,
) -> Tensor:
    """Choose for every sample of a round the steps that draw noise and can be trained.

    A window has ``size`` steps of those that are stochastic at all. It is a function of the round, so nothing of
    it need be saved::

        sliding, size 2, interval 3, 5 steps     round 0-2  x x . . .     round 6-8  . . x x .
                                                 round 3-5  . x x . .     round 9-11 . . . x x, then as round 0

    Args:
        stochastic: [K] bool, from `FlowMatchDiscreteScheduler.trained_steps`.
        placement: ``all`` steps; the ``first`` ones; ``sliding`` on by one step every ``interval`` rounds, and from
            the last ones back to the first; ``per_group``: each prompt group draws its own place in each round.
        size: Steps in the window; more than there are stochastic ones are a ValueError.
        num_samples: N videos of the round; groups are contiguous.
        num_generations: Group size.
        round_index: Number of the round.
        interval: See ``placement``.
        generator: CPU generator for ``per_group``; equal seeds give equal windows.

    Returns:
        [N, K] bool on the CPU; none where no step is stochastic.
    """
    steps = stochastic.nonzero().squeeze(1)
    if placement == "all" or not len(steps):
        return stochastic.repeat(num_samples, 1)
    num_places = len(steps) - size + 1
    if size < 1 or num_places < 1:
        raise ValueError(
            f"sde_window_size must lie within [1, {len(steps)}], the stochastic ones of {len(stochastic)} denoising "
            f"steps, got {size}"
        )
    num_groups = -(-num_samples // num_generations)
    if placement == "per_group":
        starts = torch.randint(num_places, (num_groups,), generator=generator)
    else:
        moves = round_index // interval if placement == "sliding" else 0
        starts = torch.tensor(moves % num_places).expand(num_groups)
    chosen = steps[starts[:, None] + torch.arange(size)]
    windows = torch.zeros(num_groups, len(stochastic), dtype=torch.bool).scatter_(1, chosen, True)
    return windows.repeat_interleave(num_generations, dim=0)[:num_samples]
