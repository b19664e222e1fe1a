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


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_range: float, scale: Tensor | float
) -> tuple[Tensor, PolicyLossDiagnostics]:
    """``mean(scale * max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range)))``, ``r = exp(log_probs - old_log_probs)``.

    Once a ratio has moved past the clip in the direction its advantage asks for, its sample has no gradient. A sample
    with advantage 0 contributes 0.

    Args:
        log_probs: [N] of the (sample, step) pairs under the policy being trained, with gradient.
        old_log_probs: Same shape, recorded in the rollout.
        advantages: Broadcastable to log_probs.
        clip_range: Largest change of a ratio that is still rewarded, > 0 (default of the project 1e-4).
        scale: Per-pair factor from `equalizer_scales`, broadcastable to log_probs; 1 for none.

    Returns:
        The loss (0-dim, to be minimised) and its diagnostics.

    Raises:
        ValueError: If shapes do not fit or clip_range is not positive.
    """
    if not clip_range > 0:
        raise ValueError(f"clip_range must be positive (default 1e-4), got {clip_range}")
    scale = torch.as_tensor(scale, dtype=log_probs.dtype, device=log_probs.device)
    _check_shapes(log_probs, old_log_probs=old_log_probs, advantages=advantages, scale=scale)

    ratio = (log_probs - old_log_probs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
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
