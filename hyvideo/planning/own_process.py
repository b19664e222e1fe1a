"""A process for what changes PyTorch as a whole, so that the process of a run stays as it was."""

import ctypes
import signal
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def in_own_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a process of its own, which later calls share, and return or raise what it does.

    The pretended GPU must never be known to a process that trains: PyTorch would take it for the machine's accelerator.

    Raises:
        RuntimeError: the process was killed; most often memory ran out.
    """
    pipe = _process()
    try:
        pipe.send((function, args, kwargs))
        answer, error = pipe.recv()
    except (EOFError, BrokenPipeError):
        _process.cache_clear()
        raise RuntimeError(
            "the process that simulates a GPU was killed; perhaps this machine's memory ran out"
        ) from None
    if error is not None:
        raise error
    return answer


@cache
def _process() -> Connection:
    """Start the process and return the pipe to it. It ends with this one, however that ends."""
    ours, theirs = get_context("spawn").Pipe()
    get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True).start()
    theirs.close()
    return ours


def _serve(pipe: Connection) -> None:
    """Make calls until the pipe's other end is gone; on Linux a call ends then too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the caller answers it
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*args, **kwargs), None))
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))
            pipe.send((None, error))
