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
