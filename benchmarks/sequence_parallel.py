"""One video over 2 and 4 ranks against one process, forward and backward, in one launch.

On a CPU the ranks share the cores that one process has to itself: this shows what splitting costs, not what it gains.
Example: `python -m benchmarks.sequence_parallel`
"""

import copy
import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.attention import VIDEO_SHAPE
from benchmarks.network import SMALL, build_inputs, build_transformer, fast_dtype, training_pass
from benchmarks.paired import Result, compare, print_results
from hyvideo.distributed.mesh import build_mesh
from hyvideo.distributed.process_group import process_group
from hyvideo.models.attention import install_attention

WORLD_SIZES = (2, 4)


def measure() -> list[Result]:
    """Launch each number of ranks; with GPUs, those for which there are enough."""
    results = []
    for world_size in WORLD_SIZES:
        if torch.cuda.is_available() and torch.cuda.device_count() < world_size:
            continue
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        answers = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (world_size, port, answers), nprocs=world_size)
        results.append(answers.get())
    return results


def _rank(rank: int, world_size: int, port: int, answers: mp.SimpleQueue) -> None:
    """Be one rank: take part in every run, and on rank 0 report what was measured."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(number) for name, number in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with process_group(timeout_seconds=600):
        mesh = build_mesh(sp_size=world_size, device_type="cuda" if torch.cuda.is_available() else "cpu")
        whole = build_transformer(fast_dtype(), **SMALL)
        split = install_attention(copy.deepcopy(whole), mesh.sp_group)
        install_attention(whole)
        inputs = build_inputs(whole, VIDEO_SHAPE, (200,), padded=True)
        cores = os.cpu_count()
        alone = _together(training_pass(whole, inputs) if rank == 0 else lambda: None, threads=cores)
        shared = _together(training_pass(split, inputs), threads=max(1, cores // world_size))
        result = compare(f"sequence_parallel/{world_size}_ranks", f"one process / {world_size} ranks", alone, shared)
    if rank == 0:
        answers.put(result)


def _together(run: Callable[[], None], *, threads: int) -> Callable[[], None]:
    """Let all ranks begin and end a run together, with `threads` threads each."""

    def timed() -> None:
        """Run between two barriers."""
        torch.set_num_threads(threads)
        dist.barrier()
        run()
        dist.barrier()

    return timed


if __name__ == "__main__":
    print_results(measure())
