"""Processes for what changes PyTorch as a whole, so that the process of a run stays as it was."""

import ctypes
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from multiprocessing.util import Finalize
from typing import Any, TypeVar

R = TypeVar("R")


def in_own_processes(function: Callable[..., R], calls: Sequence[Sequence[Any]], **kwargs: Any) -> list[R]:
    """Call a function with each of some lists of arguments, two at a time, in processes that later calls share.

    The pretended GPU must never be known to a process that trains: PyTorch would take it for the machine's accelerator.

    Raises:
        RuntimeError: a process was killed; most often memory ran out.
    """
    try:
        begun = [_processes().submit(function, *arguments, **kwargs) for arguments in calls]
        return [each.result() for each in begun]
    except BrokenProcessPool:
        _processes.cache_clear()
        raise RuntimeError(
            "the process that rehearses on a pretended GPU was killed; perhaps this machine's memory ran out"
        ) from None


@cache
def _processes() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(2, get_context("spawn"), _begin)
    Finalize(pool, pool.shutdown, exitpriority=100)  # before its queues close; multiprocessing waits for it
    return pool


def _begin() -> None:
    """End with the process that began this one, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all processes of a terminal
