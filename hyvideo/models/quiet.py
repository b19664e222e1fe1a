"""Silence diffusers' log messages below error level."""

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers.utils import logging as diffusers_logging


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Silence diffusers but for errors (it warns that guiders are experimental, and that a dtype of None is a cast)."""
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(verbosity)
