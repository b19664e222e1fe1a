"""Join the processes that a launcher started into one group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def process_group(timeout_seconds: int, *, of_one: bool = False) -> Iterator[None]:
    """Be one of `WORLD_SIZE` ranks inside the block, as torchrun's variables say; one process has no group.

    GPUs, one per `LOCAL_RANK`, communicate over NCCL, and over gloo for small values and checkpoints; CPUs over gloo.

    A ValueError says that a variable is wrong, there is no GPU for this rank, or the ranks did not meet.

    Args:
        timeout_seconds: how long to wait for missing ranks, and later in any collective.
        of_one: give one process a group too, which FSDP needs to keep weights in host memory.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        if of_one:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        yield
        if of_one:
            dist.destroy_process_group()
        return
    place = {name: os.environ.get(name, "") for name in LAUNCHER_VARIABLES}
    wrong = [name for name, value in place.items() if not value or (name != "MASTER_ADDR" and not value.isdecimal())]
    if wrong:
        raise ValueError(
            f"WORLD_SIZE is {place['WORLD_SIZE']}, but {', '.join(wrong)} is not set or no whole number: start the "
            "ranks with torchrun (run_post_train.sh does), or unset WORLD_SIZE for one process."
        )
    backend = "gloo"
    if torch.cuda.is_available():
        backend, local_rank = "cpu:gloo,cuda:nccl", int(place["LOCAL_RANK"])
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK is {local_rank}, but this machine shows {torch.cuda.device_count()} GPU(s): start at most "
                "one process per GPU (NPROC_PER_NODE)."
            )
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (dist.DistError, RuntimeError, OSError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"rank {place['RANK']} of {place['WORLD_SIZE']} could not meet the others at "
            f"{place['MASTER_ADDR']}:{place['MASTER_PORT']} within {timeout_seconds} s: {cause} Check that all ranks "
            "were started and reach that address, and that its port is free on the first machine (MASTER_PORT chooses "
            "it)."
        ) from error
    yield
    dist.destroy_process_group()
