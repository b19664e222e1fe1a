"""Marks where the host may wait for the device; a rehearsal (`scripts.rehearse`) reports every other place."""

from collections.abc import Iterator
from contextlib import contextmanager

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
