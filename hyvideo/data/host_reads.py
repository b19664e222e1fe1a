"""Marks where the host may wait for the device; a rehearsal (`scripts.rehearse`) reports every other place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

REASONS: list[str] = []
"""Why the host may wait now, the innermost reason last."""


@contextmanager
def host_read(reason: str) -> Iterator[None]:
    """Allow the host to wait for the device inside the block, for a reason that is worth it."""
    REASONS.append(reason)
    try:
        yield
    finally:
        REASONS.pop()


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to `device` from pinned memory, so that the host need not wait; one that is there stays."""
    there = tensor.device.type == torch.device(device).type
    return tensor if there else tensor.pin_memory().to(device, non_blocking=True)
