"""The anchor of the trust region: the weights the policy may not run away from (paper Eq. 11-15)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Anchor:
    """A second copy of the trained weights, exchanged with the policy's in place while it is asked.

    With LoRA that copy is the adapters alone. A fixed anchor is never refreshed; a moving one is, every
    `update_ref_model_step` updates.

    Args:
        parameters: the trained parameters by name; copied now, so the anchor starts at the policy.
        offload: keep the copy on the CPU outside of `in_place_of_policy`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, offload: bool) -> None:
        self._parameters = dict(parameters)
        self._copy: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            copy = parameter.detach().clone()
            self._copy[name] = copy.cpu() if offload else copy
        self.equals_policy = True

    def refresh(self) -> None:
        """Move the anchor to the policy."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self._copy[name].copy_(parameter)
        self.equals_policy = True

    def policy_moved(self) -> None:
        """Note that the policy was updated: the two differ from now on."""
        self.equals_policy = False

    @contextmanager
    def in_place_of_policy(self) -> Iterator[None]:
        """Let the policy's module compute with the anchor's weights; nothing is copied but what was offloaded."""
        policy = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self._copy[name].to(parameter.device)
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = policy[name]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the anchor's weights by name (references, not copies)."""
        return dict(self._copy)

    def load_state_dict(self, state: Mapping[str, Tensor], *, equals_policy: bool) -> None:
        """Restore the anchor's weights.

        Args:
            state: weights by name, as `state_dict` gave them.
            equals_policy: whether no update happened since the last refresh.
        """
        for name, copy in self._copy.items():
            copy.copy_(state[name])
        self.equals_policy = equals_policy
