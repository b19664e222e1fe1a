"""Join the processes that a launcher started: this rank's place in the layout, and the groups that it talks to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyvideo.config.schema import Config
from hyvideo.distributed.layout import Layout, guidance_ranks

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


@dataclass(frozen=True)
class Mesh:
    """The place of this rank among all, and the groups it talks to.

    Attributes:
        rank: this process among all.
        layout: of the ranks; it knows nothing of a round.
        sp_group: the ranks that share the tokens of this rank's rows; None where each has whole rows.
        guidance_group: two ranks, of which the first computes the prompted rows of their videos and the second the
            negative ones; None where each computes both, or there is no guidance.
        video_group: the ranks that share a video, in either way; None where each has its own.
        weights: device mesh over which weights are sharded: `(shard,)`, or `(replicate, shard)` with several copies,
            where `shard` spans `layout.num_shards` ranks; None for one process, unless its weights rest in host memory.
    """

    rank: int = 0
    layout: Layout = Layout()
    sp_group: ProcessGroup | None = None
    guidance_group: ProcessGroup | None = None
    video_group: ProcessGroup | None = None
    weights: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what exists once: metrics, console, the run folder."""
        return self.rank == 0

    @property
    def sp_size(self) -> int:
        """Ranks that share the tokens of one video."""
        return self.layout.sp_size

    @property
    def guidance_ranks(self) -> int:
        """Ranks over which the two rows of guidance are split."""
        return self.guidance_group.size() if self.guidance_group else 1

    @property
    def token_ranks(self) -> int:
        """Ranks that share the tokens of a row."""
        return self.sp_group.size() if self.sp_group else 1

    @property
    def sp_rank(self) -> int:
        """Which part of a video's tokens is this rank's."""
        return self.layout.sp_rank(self.rank)

    @property
    def dp_rank(self) -> int:
        """Which of the `dp_size` ranks, or groups of `sp_size` ranks, this rank belongs to."""
        return self.layout.dp_rank(self.rank)


def build_mesh(
    *,
    sp_size: int = 1,
    dp_replicate: int = 1,
    guided: bool = False,
    device_type: str = "cpu",
    collective_timeout: int | None = None,
    one_shard: bool = False,
) -> Mesh:
    """Lay the axes over all ranks of the process group; without one, the mesh of a single process.

    Every rank raises a ValueError if the ranks do not divide into these axes.

    Args:
        sp_size: ranks per video.
        dp_replicate: copies of the sharded model.
        guided: whether the model is called with classifier-free guidance.
        device_type: `cuda` or `cpu`, where the weights are.
        collective_timeout: seconds that its groups wait for a missing rank; they do not inherit the timeout of
            `process_group`. None: the library's own, 10 minutes for NCCL.
        one_shard: let FSDP hold the weights of a single process too, as `offload weights` needs; it must have a group.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    layout = Layout(world_size, sp_size, dp_replicate)
    if world_size == 1 and not one_shard:
        return Mesh()
    timeout = None if collective_timeout is None else timedelta(seconds=collective_timeout)
    rows = guidance_ranks(sp_size, guided=guided)
    of_videos = torch.arange(world_size).reshape(-1, rows, sp_size // rows)
    sp_group = _own_group(of_videos.flatten(0, 1), timeout) if sp_size > rows else None
    guidance_group = _own_group(of_videos.transpose(1, 2).flatten(0, 1), timeout) if rows > 1 else None
    video_group = sp_group or guidance_group
    if sp_group and guidance_group:
        video_group = _own_group(of_videos.flatten(1), timeout)
    if dp_replicate == 1:
        weights = init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))  # the group of all ranks
    else:
        ranks = torch.arange(world_size).reshape(dp_replicate, -1)
        groups = [_own_group(ranks.T, timeout), _own_group(ranks, timeout)]
        weights = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=("replicate", "shard"))
    return Mesh(rank, layout, sp_group, guidance_group, video_group, weights)


def mesh_of(config: Config, device_type: str) -> Mesh:
    """Lay out the ranks as a run's settings say; a ValueError where they do not divide so."""
    return build_mesh(
        sp_size=config.parallel.sp_size,
        dp_replicate=config.parallel.dp_replicate,
        guided=config.rollout.is_guided,
        device_type=device_type,
        collective_timeout=config.parallel.collective_timeout,
        one_shard="weights" in config.parallel.offload,
    )


def _own_group(rows: torch.Tensor, timeout: timedelta | None) -> ProcessGroup:
    """Make a group of each row of ranks; return this rank's.

    A row of all ranks too gets a group of its own: on the one of all, its messages would wait for those of FSDP.
    """
    own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
    return own
