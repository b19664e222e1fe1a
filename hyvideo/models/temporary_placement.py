"""Frozen networks that rest in host memory and are on the GPU only while they compute."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyvideo.data.host_reads import host_read


@contextmanager
def temporarily_on(networks: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Let frozen networks compute on `device` inside the block; nothing changes there, so nothing is copied back."""
    places: list[tuple[nn.Module, str, Tensor]] = []
    away: dict[Tensor, Tensor] = {}  # by the tensor itself, so that what modules share stays shared
    for network in networks:
        for module in network.modules():
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                places.append((module, name, tensor))
                if tensor not in away:
                    with host_read("networks that rest in host memory visit the device, once per round"):
                        copy = tensor.detach().to(device)
                    away[tensor] = nn.Parameter(copy, False) if isinstance(tensor, nn.Parameter) else copy
    try:
        for module, name, tensor in places:
            setattr(module, name, away[tensor])
        yield
    finally:
        for module, name, tensor in places:
            setattr(module, name, tensor)
