"""Limits of the system on this process, lowered for a while."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Lower a limit, one of `resource.RLIMIT_*`: a full disk is files that end at RLIMIT_FSIZE bytes."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def bounded_memory(most: int = 4 * 2**30) -> Iterator[None]:
    """Make a MemoryError of what takes more than `most` bytes from now on, and would fill the machine."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, taken + most):
        yield
