"""Keep notes of a library to itself that tell the user nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers.utils import logging as diffusers_logging


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Silence diffusers but for errors (it notes that guiders are young, and that a dtype of None is a cast)."""
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(verbosity)
