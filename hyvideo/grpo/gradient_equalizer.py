"""Temporal gradient equalizer (paper Eq. 8-9, A.5): every trained step contributes gradients of the same scale."""

import torch
from torch import Tensor

EPSILON = 1e-8
"""Added to each norm before the division."""


def equalizer_scales(norms: Tensor) -> Tensor:
    """``scale_t = median(N) / (N_t + eps)`` over the finite, positive norms; 1 for the other steps.

    N_t is the scale of ``d log_prob / d v``. For SAGE at 20 steps and shift 5 the last is 148 times the first, so
    without the scales the few low-noise steps decide every update. The scales multiply the policy loss of step t, not
    the KL term. A deterministic step has norm 0 and is never trained.

    Args:
        norms: [K] from `FlowMatchDiscreteScheduler.gradient_norms`.

    Returns:
        [K], dtype of norms. The median is `torch.median`: of an even count, the lower of the middle two.
    """
    usable = norms.isfinite() & (norms > 0)
    if not usable.any():
        return torch.ones_like(norms)
    return torch.where(usable, norms[usable].median() / (norms + EPSILON), torch.ones_like(norms))


def velocity_gradients(policy_loss: Tensor, mean: Tensor, sensitivity: Tensor) -> Tensor:
    """Gradient of each (sample, step) pair by the predicted velocity, ``sqrt(D) |d loss / d v|``, [N].

    With D values per sample this is ``scale |A| ratio N_t RMS(noise)``, and 0 where the clip or the advantage silences
    a pair. It costs no pass through the model: the gradient is taken up to the transition's mean.

    Args:
        policy_loss: Mean over the N pairs, with gradient; see `clipped_policy_loss`.
        mean: [N, ...] of the pairs' transitions, part of the loss's graph.
        sensitivity: [N], ``|d mean / d v|`` at each pair's step.
    """
    (gradient,) = torch.autograd.grad(policy_loss, mean, retain_graph=True)
    per_pair = gradient.flatten(1) * len(mean)
    return per_pair.norm(dim=1) * per_pair.shape[1] ** 0.5 * sensitivity.to(per_pair)
