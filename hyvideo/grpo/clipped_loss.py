"""The clipped policy loss (GRPO, paper Section 3.1), weighted per step by the temporal gradient equalizer."""

import torch
from torch import Tensor


def normalized_log_ratio(mean: Tensor, old_mean: Tensor, next_latents: Tensor, std: Tensor) -> Tensor:
    """``mean(D noise)`` with ``D = mu - mu_old``, ``noise = (x - mu_old) / std``: the log-ratio of GRPO-Guard.

    The log-ratio of two Gaussians is ``mean(D noise) / std - mean(D^2) / (2 std^2)``. Its second term is never
    positive, so that ratios lie below 1 and the clip hardly acts above it, and its scale differs from step to step.
    GRPO-Guard (arXiv 2510.22319) adds the second term back and multiplies by std.

    Args:
        mean: [N, ...] transition means of the policy being trained, with gradient.
        old_mean: [N, ...] those of the rollout.
        next_latents: [N, ...] what the rollout drew.
        std: Of the transitions, broadcastable to mean, > 0.

    Returns:
        [N], with gradient.
    """
    return ((mean - old_mean) * ((next_latents - old_mean) / std)).flatten(1).mean(1)


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_range: float,
    scale: Tensor | float,
    *,
    clip_range_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``mean(scale * max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range)))``, ``r = exp(log_probs - old_log_probs)``.

    Once a ratio has moved past the clip in the direction its advantage asks for, its sample has no gradient. A sample
    with advantage 0 contributes 0.

    Args:
        log_probs: [N] of the (sample, step) pairs under the policy being trained, with gradient.
        old_log_probs: Same shape, recorded in the rollout.
        advantages: Broadcastable to log_probs.
        clip_range: Largest change of a ratio that is still rewarded, > 0 (default of the project 1e-4).
        clip_range_high: Bound above 1 where it differs from the one below (DAPO, arXiv 2503.14476); None: the same.
        scale: Per-pair factor from `equalizer_scales`, broadcastable to log_probs; 1 for none.

    Returns:
        The loss (0-dim, to be minimised), and the share of samples whose gradient the clip removed (0-dim, without
        gradient). A shape that would broadcast the loss to more pairs than there are is a ValueError.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    scale = torch.as_tensor(scale, dtype=log_probs.dtype, device=log_probs.device)
    ratio = (log_probs - old_log_probs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + high)
    losses = scale * torch.maximum(unclipped, clipped)
    if not old_log_probs.shape == losses.shape == log_probs.shape:
        shapes = ", ".join(str(tuple(given.shape)) for given in (log_probs, old_log_probs, advantages, scale))
        raise ValueError(f"log_probs, old_log_probs, advantages and scale do not fit each other: {shapes}")
    loss = losses.mean()
    return loss, (clipped > unclipped).to(loss.dtype).mean()
