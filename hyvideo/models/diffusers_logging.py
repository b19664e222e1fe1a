"""Silence diffusers' log messages."""

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers.utils import logging as diffusers_logging


@contextmanager
def without_diffusers_logs() -> Iterator[None]:
    """Silence diffusers: it warns that guiders are experimental, and logs what it raises, line by line of a network."""
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity(diffusers_logging.CRITICAL)
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(verbosity)
