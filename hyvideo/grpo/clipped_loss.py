"""The clipped policy loss (GRPO, paper Section 3.1), weighted per step by the temporal gradient equalizer."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLossDiagnostics:
    """What happened inside `clipped_policy_loss`; 0-dim tensors without gradient.

    Attributes:
        clip_fraction: Share of samples whose gradient the clip removed.
        ratio_max_deviation: Largest |ratio - 1|; exactly 0 when the replay equals the rollout.
    """

    clip_fraction: Tensor
    ratio_max_deviation: Tensor


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
) -> tuple[Tensor, PolicyLossDiagnostics]:
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
        The loss (0-dim, to be minimised) and its diagnostics.

    Raises:
        ValueError: If shapes do not fit or a clip range is not positive.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    if not (clip_range > 0 and high > 0):
        raise ValueError(f"clip_range must be positive (default 1e-4), got {min(clip_range, high)}")
    scale = torch.as_tensor(scale, dtype=log_probs.dtype, device=log_probs.device)
    _check_shapes(log_probs, old_log_probs=old_log_probs, advantages=advantages, scale=scale)

    ratio = (log_probs - old_log_probs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + high)
    loss = (scale * torch.maximum(unclipped, clipped)).mean()

    with torch.no_grad():
        diagnostics = PolicyLossDiagnostics(
            clip_fraction=(clipped > unclipped).to(loss.dtype).mean(),
            ratio_max_deviation=(ratio - 1).abs().max(),
        )
    return loss, diagnostics


def _check_shapes(log_probs: Tensor, old_log_probs: Tensor, **broadcast: Tensor) -> None:
    """Refuse shapes that would silently broadcast the loss to more pairs than there are."""
    if old_log_probs.shape != log_probs.shape:
        raise ValueError(
            f"old_log_probs must have the shape of log_probs {tuple(log_probs.shape)}, got {tuple(old_log_probs.shape)}"
        )
    for name, tensor in broadcast.items():
        try:
            tensor.expand_as(log_probs)
        except RuntimeError as error:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} does not broadcast to log_probs {tuple(log_probs.shape)}"
            ) from error
