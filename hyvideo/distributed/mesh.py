"""This rank's place in the layout, and the groups of ranks that it talks to."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyvideo.distributed.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """The place of this rank among all, and the groups it talks to.

    Attributes:
        rank: this process among all.
        layout: of the ranks; it knows nothing of a round.
        sp_group: the ranks of this rank's videos; None when each has its own.
        weights: device mesh over which weights are sharded: `(shard,)`, or `(replicate, shard)` with several copies,
            where `shard` spans `layout.num_shards` ranks; None for one process.
    """

    rank: int = 0
    layout: Layout = Layout()
    sp_group: ProcessGroup | None = None
    weights: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what exists once: metrics, console, the run folder."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.layout.world_size

    @property
    def sp_size(self) -> int:
        """Ranks that share the tokens of one video."""
        return self.layout.sp_size

    @property
    def sp_rank(self) -> int:
        """Which part of a video's tokens is this rank's."""
        return self.layout.sp_rank(self.rank)

    @property
    def dp_size(self) -> int:
        """Number of ranks, or groups of `sp_size` ranks, that sample videos of their own."""
        return self.layout.dp_size

    @property
    def dp_rank(self) -> int:
        """Which of them this rank belongs to."""
        return self.layout.dp_rank(self.rank)


def build_mesh(
    *, sp_size: int = 1, dp_replicate: int = 1, device_type: str = "cpu", collective_timeout: int | None = None
) -> Mesh:
    """Lay the axes over all ranks of the process group; without one, the mesh of a single process.

    Args:
        sp_size: ranks per video.
        dp_replicate: copies of the sharded model.
        device_type: `cuda` or `cpu`, where the weights are.
        collective_timeout: seconds that its groups of some ranks wait for one of them, as `process_group` has it for
            all; a group does not inherit it. None: the library's own, 10 minutes for NCCL.

    Raises:
        ValueError: the ranks do not divide into these axes; every rank raises it.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    layout = Layout(world_size, sp_size, dp_replicate)
    if world_size == 1:
        return Mesh()
    timeout = None if collective_timeout is None else timedelta(seconds=collective_timeout)
    return Mesh(
        rank,
        layout,
        sp_group=_own_group(torch.arange(world_size).reshape(-1, sp_size), timeout) if sp_size > 1 else None,
        weights=_weights_mesh(torch.arange(world_size).reshape(dp_replicate, -1), device_type, timeout),
    )


def _weights_mesh(ranks: torch.Tensor, device_type: str, timeout: timedelta | None) -> DeviceMesh:
    """Return the device mesh of `ranks`, long `[dp_replicate, shards]`: both axes, or the shards of one copy."""
    if len(ranks) == 1:
        return init_device_mesh(device_type, (ranks.numel(),), mesh_dim_names=("shard",))  # the group of all ranks
    groups = [_own_group(ranks.T, timeout), _own_group(ranks, timeout)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=("replicate", "shard"))


def _own_group(rows: torch.Tensor, timeout: timedelta | None) -> ProcessGroup:
    """Make a group of each row of ranks; return this rank's. One row, which has all ranks, has its group already."""
    if len(rows) == 1:
        return dist.group.WORLD
    own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
    return own
