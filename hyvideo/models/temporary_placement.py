"""Frozen networks that rest in host memory and are on the GPU only while they compute."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def temporarily_on(networks: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Let frozen networks compute on `device` inside the block; nothing changes there, so nothing is copied back."""
    places = _places(networks)
    home = {id(tensor): tensor for _, _, tensor in places}
    away = {key: _frozen_copy(tensor, device) for key, tensor in home.items()}  # what modules share stays shared
    try:
        for module, name, tensor in places:
            setattr(module, name, away[id(tensor)])
        yield
    finally:
        for module, name, tensor in places:
            setattr(module, name, tensor)


def _frozen_copy(tensor: Tensor, device: torch.device) -> Tensor:
    copy = tensor.detach().to(device)
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def _places(networks: Sequence[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    """List every module's own parameters and buffers."""
    modules = [module for network in networks for module in network.modules()]
    return [
        (module, name, tensor)
        for module in modules
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    ]
