"""Dual trust region (paper Eq. 11-15): how far the policy is from its anchor, how fast it leaves the rollout policy."""

from torch import Tensor

VARIANCE_FLOOR = 1e-6
"""Added to the transition variance, so that a nearly deterministic step does not blow up the position term."""


def position_kl(mean: Tensor, anchor_mean: Tensor, std: Tensor) -> Tensor:
    """Position term: KL between two transitions of one std, ``mean((mu - mu_anchor)^2) / (2 (std^2 + 1e-6))``.

    Args:
        mean: [B, ...] transition mean of the policy, with gradient.
        anchor_mean: [B, ...] of the anchor from the same latent, without gradient.
        std: Transition std as `FlowMatchDiscreteScheduler.transition` returns it, broadcastable to mean.

    Returns:
        0-dim: mean over the non-batch dims, then over the batch. Means of two shapes are a ValueError.
    """
    if mean.shape != anchor_mean.shape:
        raise ValueError(f"mean {tuple(mean.shape)} and anchor_mean {tuple(anchor_mean.shape)} must have one shape")
    return ((mean - anchor_mean).square() / (2 * (std.square() + VARIANCE_FLOOR))).mean()


def velocity_kl(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Velocity (step-wise) term: the rollout-phase estimate ``mean(logp_old - logp)`` of KL(rollout policy || policy).

    It is 0 while the policy equals the rollout's, hence throughout a round with one update. Its gradient there has the
    mean 0 and is noise, so GRPO leaves it out (the release does not).

    Args:
        old_log_probs: [N] recorded in the rollout.
        log_probs: [N] under the policy being trained, with gradient.

    Returns:
        0-dim; an estimate from samples, so it can be negative. Two shapes are a ValueError.
    """
    if old_log_probs.shape != log_probs.shape:
        raise ValueError(
            f"old_log_probs {tuple(old_log_probs.shape)} and log_probs {tuple(log_probs.shape)} must have one shape"
        )
    return (old_log_probs - log_probs).mean()


def dual_kl(position: Tensor, velocity: Tensor, moving_weight: float = 1.0, step_weight: float = 0.1) -> Tensor:
    """``moving_weight * position + step_weight * velocity`` (paper Eq. 15), 0-dim."""
    return moving_weight * position + step_weight * velocity
