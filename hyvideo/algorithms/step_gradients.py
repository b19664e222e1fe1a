"""The gradient at each denoising step, measured: does the equalizer make the steps' gradients equal?"""

import torch
from torch import Tensor

from hyvideo.data.host_reads import host_read
from hyvideo.distributed.collectives import gather
from hyvideo.grpo.gradient_equalizer import velocity_gradients


class StepGradients:
    """Sums up, over the pairs of an update, each denoising step's gradient by the predicted velocity.

    Args:
        sensitivity: [K], ``d mean / d v`` of the sampler's steps.
    """

    def __init__(self, sensitivity: Tensor) -> None:
        self._sensitivity = sensitivity.abs().float()
        self._sums: Tensor | None = None

    def add(self, policy_loss: Tensor, mean: Tensor, index: Tensor) -> None:
        """Add one micro-batch.

        Args:
            policy_loss: mean over its N pairs, with gradient.
            mean: [N, ...] of their transitions.
            index: [N] their steps, on the CPU.
        """
        norms = velocity_gradients(policy_loss, mean, self._sensitivity[index])
        if self._sums is None:
            self._sums = norms.new_zeros(2, len(self._sensitivity))
        self._sums.index_add_(1, index.to(norms.device), torch.stack([norms, torch.ones_like(norms)]))

    def pop(self) -> dict[str, float]:
        """Mean over the pairs of all ranks since the last pop, for every step that had any; every rank must call it.

        Returns:
            ``{"velocity_grad/step_00": norm, ...}``, after the equalizer. Divided by the step's scale: before it.
        """
        sums, self._sums = self._sums, None
        with host_read("the gradient of each denoising step, once per update"):
            own = None if sums is None else sums.cpu()
        parts = [part for part in gather(own) if part is not None]
        if not parts:
            return {}
        norms, counts = torch.stack(parts).sum(0).tolist()
        return {
            f"velocity_grad/step_{step:02d}": norm / count
            for step, (norm, count) in enumerate(zip(norms, counts, strict=True))
            if count
        }
