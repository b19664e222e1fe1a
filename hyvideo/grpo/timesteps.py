"""Which denoising steps of a rollout draw noise, which (sample, step) pairs are trained, and in which of its updates.

Noise outside the trained steps only blurs what a score says about them, and steps without noise need no replay.
Sources: MixGRPO (arXiv 2507.21802) for the window that slides from the first steps to the last, Flash-GRPO (arXiv
2605.15980) for one step per prompt group (iso-temporal groups): videos that are compared are noised at the same step.
"""

import math
from typing import Literal, NamedTuple

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


class Pairs(NamedTuple):
    """The pairs of one optimizer update, in the order of training; micro-batches are consecutive slices.

    Attributes:
        sample_index: [P] long, which video of the rollout.
        step_index: [P] long, which denoising step of it.
    """

    sample_index: Tensor
    step_index: Tensor

    def where(self, mask: Tensor) -> "Pairs":
        """Return those of the pairs for which a bool `[B, K]` of (video, step) is true, in their order."""
        chosen = mask[self]
        return Pairs(self.sample_index[chosen], self.step_index[chosen])

    def micro_batches(self, size: int) -> list["Pairs"]:
        """Return consecutive slices of at most `size` pairs; none where there are no pairs."""
        slices = zip(self.sample_index.split(size), self.step_index.split(size), strict=True)
        return [Pairs(*parts) for parts in slices if len(parts[0])]


def select_timesteps(
    trained_mask: Tensor, fraction: float, num_samples: int, *, permute: bool, generator: torch.Generator
) -> Tensor:
    """Choose for every sample the ``T = max(1, floor(fraction * trained))`` steps to train, in their order of use.

    Args:
        trained_mask: [K] bool, from `FlowMatchDiscreteScheduler.trained_steps`; or [N, K] with as many steps in every
            row, from `noisy_steps`.
        fraction: Share of the trained steps to keep (``timestep_fraction``), in (0, 1].
        num_samples: N videos.
        permute: True: each sample draws its own permutation and keeps the first T, so that an update or micro-batch
            mixes noise levels. False: all samples use the T noisiest steps in the order of denoising.
        generator: CPU generator; equal seeds give equal choices. Ranks that share a video must share it.

    Returns:
        [N, T] long on the CPU; each row has distinct steps. Where no step can be trained, it is a ValueError.

    Example:
        >>> select_timesteps(mask, 0.5, num_samples=2, permute=True, generator=generator)  # 8 trained steps
        tensor([[5, 2, 7, 0],
                [1, 6, 3, 4]])
    """
    mask = trained_mask.expand(num_samples, -1)
    if not mask.any():
        raise ValueError(
            f"none of the {mask.shape[1]} denoising steps is stochastic, so there is nothing to train: use "
            "eta > 0, and for sde_type cps more than one step"
        )
    trained = mask.nonzero()[:, 1].reshape(num_samples, -1)
    count = num_kept(fraction, trained.shape[1])
    if not permute:
        return trained[:, :count]
    return torch.stack([row[torch.randperm(len(row), generator=generator)[:count]] for row in trained])


def num_kept(fraction: float, num_trained: int) -> int:
    """Return how many of the trained steps a fraction keeps: rounded down as in the reference, but at least one."""
    return max(1, math.floor(fraction * num_trained + 1e-9))  # despite rounding error: 0.29 * 100 is below 29


def split_updates(steps: Tensor, num_updates: int, *, num_generations: int) -> list[Pairs]:
    """Deal every (sample, step) pair to exactly one of ``num_updates`` optimizer updates.

    Columns of ``steps`` are dealt one after another, so each update gets all samples with steps of their own::

        steps (4 samples, T = 4)      update 0    update 1
        sample 0:  5  2 | 7  0        0:5 ...     0:7 ...
        sample 1:  1  6 | 3  4        1:1 ...     1:3 ...

    When T is a multiple of ``num_updates``, every update sees each sample equally often in the rollout's order, so that
    its micro-batches are composed as the rollout's and the replay repeats it bit for bit. Otherwise sizes differ by at
    most one pair, and samples and groups are seen equally often up to one pair, because within a column the samples are
    dealt from each group in turn.

    Args:
        steps: [N, T] long, from `select_timesteps`.
        num_updates: ``updates_per_rollout``, from 1 to N * T (else a ValueError).
        num_generations: Group size; groups, or the parts of them that a rank holds, are contiguous blocks of samples.
    """
    num_samples, num_steps = steps.shape
    check_updates(num_updates, num_samples, num_steps)
    samples = torch.arange(num_samples)
    if num_steps % num_updates:
        samples = samples.reshape(-1, math.gcd(num_generations, num_samples)).T.reshape(-1)
    sample_index = samples.repeat(num_steps)
    step_index = steps[samples].T.reshape(-1)
    sample_parts, step_parts = sample_index.tensor_split(num_updates), step_index.tensor_split(num_updates)
    return [Pairs(*parts) for parts in zip(sample_parts, step_parts, strict=True)]


def check_updates(num_updates: int, num_samples: int, num_steps: int) -> None:
    """Raise a ValueError unless every update gets a (sample, step) pair."""
    num_pairs = num_samples * num_steps
    if not 1 <= num_updates <= num_pairs:
        raise ValueError(
            f"updates_per_rollout must lie within [1, {num_pairs}], the number of (sample, step) pairs that a rank has "
            f"({num_samples} samples x {num_steps} steps), got {num_updates}"
        )
