"""A sampler and a trust region of one's own, as a user would write them outside the package."""

import torch
from torch import Tensor

from hyvideo.algorithms.grpo import GRPO
from hyvideo.schedulers.scheduling_flow_match_discrete import StepWeights, marginal_preserving


def fading(sigma: Tensor, sigma_next: Tensor, eta: float) -> StepWeights:
    """Diffusion that fades with the noise level: the variance ``eta^2 delta sigma_next`` leaves none at the end."""
    return marginal_preserving(sigma, sigma_next, eta**2 * (sigma - sigma_next) * sigma_next)


class FartherTerm(GRPO):
    """Follow whichever term of the trust region is larger, instead of their sum."""

    def divergence(self, position: Tensor, velocity: Tensor) -> Tensor:
        return torch.maximum(position, velocity)
