"""A process for what changes PyTorch as a whole, so that the process of a run stays as it was."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def in_own_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a process of its own, which later calls share, and return or raise what it does.

    The pretended GPU must never be known to a process that trains: PyTorch would take it for the machine's accelerator.
    """
    return _process().submit(function, *args, **kwargs).result()


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))
