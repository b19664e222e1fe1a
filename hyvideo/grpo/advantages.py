"""Group-relative advantages (GRPO, paper Section 3.1): each video is judged against the others of its own prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SPREAD_FLOOR = 1e-6
"""Smallest standard deviation a group is divided by: equal rewards give advantage 0 instead of 0 / 0."""


Divisor = Literal["group", "global", "none"]


def group_advantages(
    rewards: Tensor, num_generations: int, clip_max: float = 5.0, *, divisor: Divisor = "group"
) -> Tensor:
    """``(R - mean) / max(std, 1e-6)`` within each group, clamped to ``+-clip_max``.

    The std is the population one (ddof 0). A failed score is NaN: it is left out of its group's mean and std and gets
    advantage 0, so it has no influence.

    Args:
        rewards: [B] composite rewards; the videos of one prompt lie next to each other.
        num_generations: G, group size; B must be a multiple of it.
        clip_max: Largest magnitude of an advantage, > 0.
        divisor: ``group``; ``global``: the std of all rewards around their own mean (Flow-GRPO, arXiv 2505.05470), so
            that groups in which little differs count less; ``none``: 1 (Dr. GRPO, arXiv 2503.20783).

    Returns:
        [B] advantages, dtype of rewards, always finite. An infinite reward is a ValueError.

    Example:
        >>> group_advantages(torch.tensor([1.0, 3.0, 5.0, torch.nan]), num_generations=2)
        tensor([-1.,  1.,  0.,  0.])
    """
    centred, std = _spread(rewards, num_generations)
    if divisor == "global":
        _, std = _spread(rewards, len(rewards))
    if divisor == "none":
        std = torch.ones_like(std)
    advantages = (centred / std.clamp(min=SPREAD_FLOOR)).clamp(-clip_max, clip_max)
    return advantages.reshape(-1).to(rewards.dtype)


def normalize_then_sum(metrics: Mapping[str, Tensor], weights: Mapping[str, float], num_generations: int) -> Tensor:
    """``sum_m w_m (metric_m - mean) / max(std, 1e-6)``, mean and std of each group: rewards free of metrics' scales.

    Args:
        metrics: [B] each; the videos of one prompt lie next to each other. A NaN in a weighted metric fails its video
            in all of them.
        weights: Factor of every metric that counts.
        num_generations: G, group size; B must be a multiple of it.

    Returns:
        [B] rewards, float32; NaN for a failed video. Errors as `group_advantages`.
    """
    failed = torch.stack([metrics[name] for name in weights]).isnan().any(0)
    total = 0.0
    for name, weight in weights.items():
        centred, std = _spread(metrics[name].masked_fill(failed, torch.nan), num_generations)
        total += weight * (centred / std.clamp(min=SPREAD_FLOOR)).reshape(-1)
    return total.float().masked_fill(failed, torch.nan)


def gdpo_advantages(
    metrics: Mapping[str, Tensor], weights: Mapping[str, float], num_generations: int, clip_max: float = 5.0
) -> Tensor:
    """GDPO (arXiv 2601.05242): `normalize_then_sum`, then ``(S - mean) / max(std, 1e-6)`` over the whole round.

    `group_advantages` of the sum would bring every group to spread 1. Here a group whose metrics contradict each other,
    so that its sums lie close together, keeps smaller advantages than one whose metrics agree.
    """
    rewards = normalize_then_sum(metrics, weights, num_generations)
    return group_advantages(rewards, len(rewards), clip_max)


@dataclass(frozen=True)
class Part:
    """What one metric contributes to a round's advantages, over its groups.

    Attributes:
        spread: standard deviation within a group, in the metric's own unit.
        correlation: with the sum of the other metrics' contributions, within groups; NaN where either is constant.
        share: of the advantage. The shares of all metrics add up to 1. One below 0 pulls against the others.
    """

    spread: float
    correlation: float
    share: float


def parts_of_advantage(
    metrics: Mapping[str, Tensor], weights: Mapping[str, float], num_generations: int, *, normalized: bool
) -> dict[str, Part]:
    """Say what each weighted metric contributes: whether it decides nothing, or everything.

    A metric's contribution to a video's reward is ``w_m (metric_m - mean)``, divided by its std if `normalized`. The
    advantage is the sum of all contributions in standard deviations of its group, so a metric's share is the mean over
    groups of ``cov(contribution, sum) / var(sum)``.

    Args:
        metrics: [B] each, as `normalize_then_sum` takes them; a video that failed in one is left out.
        weights: Factor of every metric that counts.
        num_generations: G, group size.
        normalized: Whether each metric is brought to spread 1 within a group before the sum.
    """
    failed = torch.stack([metrics[name] for name in weights]).isnan().any(0)
    centred, stds = zip(
        *(_spread(metrics[name].masked_fill(failed, torch.nan), num_generations) for name in weights), strict=True
    )
    parts = torch.stack(
        [
            weight * (values / std.clamp(min=SPREAD_FLOOR) if normalized else values)
            for weight, values, std in zip(weights.values(), centred, stds, strict=True)
        ]
    )  # [M, groups, G]
    total = parts.sum(0)
    variance = total.square().sum(1)
    shares = ((parts * total).sum(2) / variance)[:, variance.sqrt() > SPREAD_FLOOR].mean(1)
    others = total - parts
    correlations = (parts * others).sum((1, 2)) / (parts.square().sum((1, 2)) * others.square().sum((1, 2))).sqrt()
    return {
        name: Part(float(stds[m].square().mean().sqrt()), float(correlations[m]), float(shares[m]))
        for m, name in enumerate(weights)
    }


def groups_without_spread(rewards: Tensor, num_generations: int) -> Tensor:
    """Which groups teach nothing because their valid rewards are all equal (or fewer than two), [B / G] bool.

    Arguments and errors as `group_advantages`; worth logging, since a reward that saturates shows here first.
    """
    _, std = _spread(rewards, num_generations)
    return std.squeeze(1) < SPREAD_FLOOR


def _spread(rewards: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    """Deviations from the group mean [B / G, G] (0 where a score failed) and group std [B / G, 1].

    In float64 the mean of equal float32 rewards is exact, so their std is 0.
    """
    if rewards.isinf().any():
        raise ValueError(f"rewards must be finite, or NaN for a failed score; got {rewards.tolist()}")
    groups = rewards.double().reshape(-1, num_generations)
    count = (~groups.isnan()).sum(dim=1, keepdim=True).clamp(min=1)
    centred = (groups - groups.nansum(dim=1, keepdim=True) / count).nan_to_num(0)
    return centred, (centred.square().sum(dim=1, keepdim=True) / count).sqrt()
