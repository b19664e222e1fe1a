"""Several gloo processes on this machine that run one function and hand back what it returned."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from hyvideo.distributed.mesh import process_group
from hyvideo.planning import own_process
from tests.support.training import REPOSITORY

TIMEOUT = 1500.0
"""Seconds after which ranks that should have ended are a failed test."""


own_process.PRELOADED = ["tests.support.preloaded"]
"""There is one server per test process, and what it imports is decided when it starts: hence one module for all."""

if str(REPOSITORY) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def forking_context() -> ForkServerContext:
    """Start the server that every process of a test is forked from; return the context that forks it."""
    own_process.start_server()
    return multiprocessing.get_context("forkserver")


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` in `world_size` processes, with a group if several; return what each rank returned."""
    context = forking_context()
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, pipes[rank][1], function, args))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for _, end in pipes:
        end.close()
    answers = [_receive(receiver) for receiver, _ in pipes]
    for rank in ranks:
        rank.join(TIMEOUT)
        if rank.is_alive():
            rank.kill()
    failed = [f"rank {rank}: {answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
    assert not failed, "\n".join(failed)
    return [answer for _, answer in answers]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables by which a launcher tells a process its place."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **{name: str(n) for name, n in numbers.items()}}


def rank_of(folder: Path, rank: int) -> int:
    """Return the process of a rank that a launcher started, with that folder in its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                if f"RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank}")


def _receive(pipe: Any) -> tuple[bool, Any]:
    """Return (whether it succeeded, its result or traceback) of one rank."""
    try:
        return pipe.recv() if pipe.poll(TIMEOUT) else (False, f"no end after {TIMEOUT} s")
    except EOFError:
        return False, "ended without a result"


def _rank(rank: int, world_size: int, port: int, pipe: Any, function: Callable[..., Any], args: Sequence[Any]) -> None:
    os.environ |= rank_environment(rank, world_size, port)
    torch.set_num_threads(1)
    try:
        with process_group(timeout_seconds=int(TIMEOUT)):
            pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)
