"""One object names every axis of the ranks; nobody else computes them."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Mesh:
    """The place of this rank among all, and the groups it talks to.

    World size = `dp_replicate` x `dp_shard` x `sp_size`. The `sp_size` ranks of one video are neighbours (they talk
    most: one node); then come the ranks that share one sharded copy of the model; its copies are farthest apart.

    Example:
        8 ranks, `sp_size` 2, `dp_replicate` 2, hence `dp_shard` 2::

            rank       0 1   2 3   4 5   6 7
            sp_rank    0 1   0 1   0 1   0 1     the two ranks of one video
            dp_rank    0 0   1 1   2 2   3 3     who samples which videos
            replica    0 0   0 0   1 1   1 1     a whole model over four ranks, twice

    Attributes:
        rank: this process among all.
        world_size: number of processes.
        sp_size: ranks that share the tokens of one video.
        dp_replicate: full copies of the sharded model.
        sp_group: the ranks of this rank's videos; None when each has its own.
        weights: device mesh over which weights are sharded: `(shard,)`, or `(replicate, shard)` with several copies,
            where `shard` spans `dp_shard x sp_size` ranks; None for one process.
    """

    rank: int = 0
    world_size: int = 1
    sp_size: int = 1
    dp_replicate: int = 1
    sp_group: ProcessGroup | None = None
    weights: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what exists once: metrics, console, the run folder."""
        return self.rank == 0

    @property
    def sp_rank(self) -> int:
        """Which part of a video's tokens is this rank's."""
        return self.rank % self.sp_size

    @property
    def dp_size(self) -> int:
        """Number of ranks, or groups of `sp_size` ranks, that sample videos of their own."""
        return self.world_size // self.sp_size

    @property
    def dp_rank(self) -> int:
        """Which of them this rank belongs to."""
        return self.rank // self.sp_size

    @property
    def dp_shard(self) -> int:
        """Data-parallel ranks over which one copy of the model is sharded."""
        return self.dp_size // self.dp_replicate

    def ranks_of(self, dp_rank: int) -> range:
        """Return the ranks that share the videos of `dp_rank`."""
        return range(dp_rank * self.sp_size, (dp_rank + 1) * self.sp_size)


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
    if min(sp_size, dp_replicate) < 1 or world_size % (sp_size * dp_replicate):
        raise ValueError(
            f"world size {world_size} must be a multiple of sp_size {sp_size} x dp_replicate {dp_replicate}, each at "
            "least 1: start another number of processes or lower one of the two."
        )
    if world_size == 1:
        return Mesh()
    timeout = None if collective_timeout is None else timedelta(seconds=collective_timeout)
    return Mesh(
        rank=rank,
        world_size=world_size,
        sp_size=sp_size,
        dp_replicate=dp_replicate,
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


@dataclass(frozen=True)
class RoundLayout:
    """Where the videos of a round lie: each prompt group inside one data-parallel rank or over several.

    The round is `num_rollouts` rollouts of `batch_size` videos per data-parallel rank; in round order each run of
    `num_generations` videos is one prompt group, as `hyvideo.data.samplers.GroupSampler` deals them.

    Example:
        batch_size 2, 4 data-parallel ranks, 1 rollout, num_generations 4; numbers are positions in the round::

            rank 0: 0 1    rank 1: 2 3  | rank 2: 4 5    rank 3: 6 7      one group on either side of the bar

    Attributes:
        batch_size: videos per data-parallel rank and rollout.
        dp_size: data-parallel ranks.
        num_rollouts: rollouts per round (`gradient_accumulation_steps`).
    """

    batch_size: int
    dp_size: int = 1
    num_rollouts: int = 1

    @property
    def num_videos(self) -> int:
        """Videos of the whole round."""
        return self.batch_size * self.dp_size * self.num_rollouts

    def positions(self, dp_rank: int) -> torch.Tensor:
        """Return where in the round the videos of `dp_rank` stand, in its order: long `[num_rollouts * batch_size]`."""
        grid = torch.arange(self.num_videos).reshape(self.num_rollouts, self.dp_size, self.batch_size)
        return grid[:, dp_rank].reshape(-1)

    def in_round_order(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Join what each data-parallel rank has of its videos, `dp_size` tensors `[num_rollouts * batch_size, ...]`."""
        order = torch.cat([self.positions(dp_rank) for dp_rank in range(self.dp_size)])
        return torch.cat(parts)[order.argsort()]
