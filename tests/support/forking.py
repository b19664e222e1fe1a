"""The server process that every process of a test is forked from: it pays the seconds of imports once."""

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from tests.support.training import REPOSITORY


@cache
def forking_context() -> ForkServerContext:
    """Start the server; return the context whose processes it forks.

    There is one server per test process, and what it imports is decided when it starts: hence one module for all.
    """
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), path]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    forkserver.ensure_running()
    return context
