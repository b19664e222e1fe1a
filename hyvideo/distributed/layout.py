"""Every question about ranks, prompt groups and the videos of a round, answered by arithmetic alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.config.schema import Config


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
