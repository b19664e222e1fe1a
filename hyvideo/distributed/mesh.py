"""The axes over which ranks share their work: who does what, by arithmetic alone, and the groups of ranks that talk.

`Layout` answers every question about ranks, prompt groups and the videos of a round, and needs no processes. `Mesh` is
one rank's place in it, once the processes that a launcher started have met.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyvideo.config.schema import Config

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Layout:
    """Who samples, scores and holds what.

    World size = `dp_replicate` x `dp_shard` x `sp_size`. The `sp_size` ranks of one video are neighbours (they talk
    most: one node); then come the ranks that share one sharded copy of the model; its copies are farthest apart.

    A round is `num_rollouts` rollouts of `batch_size` videos per data-parallel rank. In round order each run of
    `num_generations` videos is one prompt group, so a group may lie inside one data-parallel rank or over several.

    Example:
        8 ranks, `sp_size` 2, `dp_replicate` 2, hence `dp_shard` 2; `batch_size` 2 and `num_generations` 4::

            rank        0 1   2 3   4 5   6 7
            sp_rank     0 1   0 1   0 1   0 1     the two ranks of one video
            dp_rank     0 0   1 1   2 2   3 3     who samples which videos
            replica     0 0   0 0   1 1   1 1     a whole model over four ranks, twice
            positions   0 1   2 3 | 4 5   6 7     videos of a data-parallel rank; one group on either side of the bar

    Numbers that do not fit together are a ValueError with a line for each rule that they break.
    """

    world_size: int = 1  # processes
    sp_size: int = 1  # ranks that share the tokens of one video
    dp_replicate: int = 1  # full copies of the sharded model
    batch_size: int = 1  # videos per data-parallel rank and rollout
    num_generations: int = 1  # videos of one prompt, which are compared with each other
    num_rollouts: int = 1  # rollouts per round (`gradient_accumulation_steps`)

    def __post_init__(self) -> None:
        problems = [f"{name} must be at least 1; received {value}" for name, value in vars(self).items() if value < 1]
        if not problems and self.world_size % self.sp_size:
            problems.append(
                f"world size {self.world_size} is not divisible by sp_size {self.sp_size}: set sp_size to one of "
                f"{_divisors(self.world_size)}, or start another number of processes"
            )
        if problems:
            raise ValueError("\n".join(problems))
        ranks = f"{self.dp_size} data-parallel ranks (world size {self.world_size} / sp_size {self.sp_size})"
        if self.dp_size % self.dp_replicate:
            problems.append(
                f"{ranks} are not divisible by dp_replicate {self.dp_replicate}: set dp_replicate to one of "
                f"{_divisors(self.dp_size)}"
            )
        batch, group, videos = self.batch_size, self.num_generations, self.batch_size * self.dp_size
        if batch % group and group % batch:
            problems.append(
                f"batch_size {batch} and num_generations {group} must divide one another, so that prompt groups tile "
                f"the ranks: set batch_size to a multiple of {group} or to one of {_divisors(group)}"
            )
        elif videos % group:
            problems.append(
                f"one rollout has batch_size {batch} x {ranks} = {videos} videos, not a multiple of num_generations "
                f"{group}: set batch_size to a multiple of {group}, or num_generations to a divisor of {videos}"
            )
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def dp_size(self) -> int:
        """Number of ranks, or groups of `sp_size` ranks, that sample videos of their own."""
        return self.world_size // self.sp_size

    @property
    def dp_shard(self) -> int:
        """Data-parallel ranks over which one copy of the model is sharded."""
        return self.dp_size // self.dp_replicate

    @property
    def num_shards(self) -> int:
        """Ranks over which one copy of the model is sharded."""
        return self.dp_shard * self.sp_size

    @property
    def num_own_videos(self) -> int:
        """Videos of one data-parallel rank in a round."""
        return self.batch_size * self.num_rollouts

    @property
    def num_videos(self) -> int:
        """Videos of the whole round."""
        return self.num_own_videos * self.dp_size

    @property
    def num_groups(self) -> int:
        """Prompt groups of the whole round."""
        return self.num_videos // self.num_generations

    def sp_rank(self, rank: int) -> int:
        """Return which part of a video's tokens a rank has."""
        return rank % self.sp_size

    def dp_rank(self, rank: int) -> int:
        """Return the data-parallel rank that a rank belongs to."""
        return rank // self.sp_size

    def positions(self, dp_rank: int) -> Tensor:
        """Return where in the round the videos of `dp_rank` stand, in its order: long `[num_own_videos]`."""
        grid = torch.arange(self.num_videos).reshape(self.num_rollouts, self.dp_size, self.batch_size)
        return grid[:, dp_rank].reshape(-1)

    def share_to_sample(self, count: int, rank: int) -> range:
        """Return which of `count` videos a rank samples; the ranks of one video have the same."""
        return _share(count, self.dp_rank(rank), self.dp_size)

    def share_to_score(self, count: int, rank: int) -> range:
        """Return which of the `count` videos of its data-parallel rank a rank scores."""
        return _share(count, self.sp_rank(rank), self.sp_size)

    def most_to_sample(self, count: int) -> int:
        """Return the largest of all ranks' shares to sample."""
        return largest_share(count, self.dp_size)


def guidance_ranks(sp_size: int, *, guided: bool) -> int:
    """Return over how many of a video's ranks the two rows of guidance are split: 2 where `sp_size` is even, else 1.

    The rows need no exchange within the network. What remains of `sp_size` shares the tokens of a row.
    """
    return 2 if guided and sp_size % 2 == 0 else 1


def layout_of(config: Config, world_size: int) -> Layout:
    """Return the layout of a run; a ValueError if its settings do not fit this number of ranks."""
    parallel, grpo = config.parallel, config.grpo
    axes = (parallel.sp_size, parallel.dp_replicate)
    return Layout(world_size, *axes, grpo.batch_size, grpo.num_generations, grpo.gradient_accumulation_steps)


def largest_share(count: int, parts: int) -> int:
    """Return the size of the largest of `parts` shares of `count` items."""
    return -(-count // parts)


def _share(count: int, part: int, parts: int) -> range:
    """Return the consecutive items of one part; parts differ in size by at most one."""
    return range(part * count // parts, (part + 1) * count // parts)


def _divisors(number: int) -> str:
    """List the divisors of a number, those up to 1024."""
    return ", ".join(str(n) for n in range(1, min(number, 1024) + 1) if number % n == 0)


@contextmanager
def process_group(timeout_seconds: int, *, of_one: bool = False) -> Iterator[None]:
    """Be one of `WORLD_SIZE` ranks inside the block, as torchrun's variables say; one process has no group.

    GPUs, one per `LOCAL_RANK`, communicate over NCCL, and over gloo for small values and checkpoints; CPUs over gloo.

    A ValueError says that a variable is wrong, there is no GPU for this rank, or the ranks did not meet.

    Args:
        timeout_seconds: how long to wait for missing ranks, and later in any collective.
        of_one: give one process a group too, which FSDP needs to keep weights in host memory.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if os.environ.get("WORLD_SIZE", "1") == "1":
        if of_one:
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
    if torch.cuda.is_available():
        local_rank = int(place["LOCAL_RANK"])
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


def _own_group(rows: Tensor, timeout: timedelta | None) -> ProcessGroup:
    """Make a group of each row of ranks; return this rank's.

    A row of all ranks too gets a group of its own: on the one of all, its messages would wait for those of FSDP.
    """
    own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
    return own
