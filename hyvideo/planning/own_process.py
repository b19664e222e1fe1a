"""Processes for what changes PyTorch as a whole, so that the process of a run stays as it was."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.util import Finalize
from typing import Any, TypeVar

PRELOADED = ["hyvideo.planning.rehearsal"]
"""What the server imports from which these processes are forked. A process of multiprocessing has one such server."""

R = TypeVar("R")


def in_own_processes(function: Callable[..., R], calls: Sequence[Sequence[Any]], **kwargs: Any) -> list[R]:
    """Call a function with each of some lists of arguments, two at a time, in processes that later calls share.

    The pretended GPU must never be known to a process that trains: PyTorch would take it for the machine's accelerator.
    A RuntimeError says that a process was killed; most often memory ran out.
    """
    try:
        begun = [_processes().submit(function, *arguments, **kwargs) for arguments in calls]
        return [each.result() for each in begun]
    except BrokenProcessPool:
        _processes.cache_clear()
        raise RuntimeError(
            "the process that rehearses on a pretended GPU was killed; perhaps this machine's memory ran out"
        ) from None


def start_server() -> None:
    """Start importing what the processes need, while this one does something else."""
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


@cache
def _processes() -> ProcessPoolExecutor:
    start_server()
    pool = ProcessPoolExecutor(2, get_context("forkserver"), _begin)
    # Before the queues to them close: a process of multiprocessing would otherwise wait for them for ever at its end.
    Finalize(pool, pool.shutdown, exitpriority=100)
    return pool


def _begin() -> None:
    """End with the process that asked for this one; never look through what the server loaded for garbage."""
    gc.freeze()
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all processes of a terminal
