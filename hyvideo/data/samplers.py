"""Which videos each rank samples: every prompt num_generations times across ranks, in an order computed, not stored."""

from collections import Counter
from dataclasses import dataclass

import torch

from hyvideo.data.randomness import seed_for


@dataclass(frozen=True)
class Assignment:
    """One video to sample.

    Attributes:
        prompt_index: position of the prompt in the list of training prompts.
        generation: number of the video among those of its prompt in this round, from 0; with `prompt_index` and the
            round it identifies the video, and thereby its noise.
    """

    prompt_index: int
    generation: int


class GroupSampler:
    """Deals prompt groups to data-parallel ranks, round after round.

    The videos of a round are numbered across all ranks, `batch_size` per rank. Each run of `num_generations` numbers
    is one group, so a group may span ranks (`batch_size` < `num_generations`) or several may lie in one; joined in
    rank order, the ranks' lists are groups in contiguous blocks. The prompts of an epoch come in a permutation seeded
    by (seed, epoch); where an epoch ends within a round, the next one begins in the same round.

    Example:
        5 prompts, batch_size 2, num_generations 4, 4 data-parallel ranks: 2 groups per round, each over 2 ranks. With
        seed 3 the first permutations are [2, 1, 4, 3, 0] and [0, 2, 1, 3, 4]; each entry is prompt.generation::

                      rank 0     rank 1     rank 2     rank 3
            round 0   2.0 2.1    2.2 2.3    1.0 1.1    1.2 1.3
            round 1   4.0 4.1    4.2 4.3    3.0 3.1    3.2 3.3
            round 2   0.0 0.1    0.2 0.3  | 0.4 0.5    0.6 0.7     the second epoch begins at the bar
            round 3   2.0 2.1    2.2 2.3    1.0 1.1    1.2 1.3

        Round 2 has prompt 0 twice, as the end of one epoch and the start of the next. Its second group counts
        on from the first, so that no two videos of a round are alike; the same holds with fewer prompts than groups.

    Args:
        num_prompts: length of the list of prompts.
        batch_size: videos per data-parallel rank and round.
        num_generations: group size.
        dp_rank: this data-parallel rank; the sequence-parallel ranks of one video share it.
        dp_size: number of data-parallel ranks.
        seed: the run's seed.

    Raises:
        ValueError: there are no prompts, the rank does not exist, or groups do not tile the ranks.
    """

    def __init__(
        self, num_prompts: int, batch_size: int, num_generations: int, dp_rank: int, dp_size: int, seed: int
    ) -> None:
        if num_prompts < 1:
            raise ValueError(f"there must be at least one prompt to sample; received num_prompts {num_prompts}")
        if min(batch_size, num_generations) < 1:
            raise ValueError(
                f"batch_size and num_generations must be at least 1; received {batch_size} and {num_generations}"
            )
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank must lie in [0, {dp_size}), the data-parallel ranks; received {dp_rank}")
        tiles = batch_size % num_generations == 0 or num_generations % batch_size == 0
        if not tiles or batch_size * dp_size % num_generations:
            raise ValueError(
                f"batch_size {batch_size} x {dp_size} data-parallel ranks = {batch_size * dp_size} videos do not "
                f"divide into groups of num_generations {num_generations} that tile the ranks: batch_size and "
                "num_generations must divide one another, and the videos be a multiple of num_generations"
            )
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.num_generations = num_generations
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.round = 0
        """Number of the round that `next_round` deals next."""
        self._groups_dealt = 0

    def next_round(self, num_rollouts: int = 1) -> list[Assignment]:
        """This rank's videos of the next round, `num_rollouts` x `batch_size` of them, and move on by one round.

        Args:
            num_rollouts: rollouts in the round (`gradient_accumulation_steps`), dealt one after another.
        """
        per_rollout = self.batch_size * self.dp_size
        num_groups = num_rollouts * per_rollout // self.num_generations
        prompts = self._prompts(self._groups_dealt, num_groups)
        self.round += 1
        self._groups_dealt += num_groups
        earlier: Counter[int] = Counter()
        videos = []
        for prompt in prompts:
            first = earlier[prompt]
            earlier[prompt] += self.num_generations
            videos += [Assignment(prompt, generation) for generation in range(first, earlier[prompt])]
        starts = range(self.dp_rank * self.batch_size, len(videos), per_rollout)
        return [video for start in starts for video in videos[start : start + self.batch_size]]

    def _prompts(self, first: int, count: int) -> list[int]:
        """Entries [first, first + count) of the endless sequence of permutations, one per epoch."""
        epochs = range(first // self.num_prompts, (first + count - 1) // self.num_prompts + 1)
        row = [prompt for epoch in epochs for prompt in self._permutation(epoch)]
        start = first - epochs.start * self.num_prompts
        return row[start : start + count]

    def _permutation(self, epoch: int) -> list[int]:
        """Order of all prompts in one epoch."""
        generator = torch.Generator().manual_seed(seed_for(self.seed, "prompt_order", epoch))
        return torch.randperm(self.num_prompts, generator=generator).tolist()

    def state_dict(self) -> dict[str, int]:
        """The position: rounds and groups dealt. The same on all ranks, and valid for another number of ranks."""
        return {"round": self.round, "groups_dealt": self._groups_dealt}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position of `state`.

        Raises:
            ValueError: the state has other keys than `state_dict` writes, or a negative position.
        """
        names = {"round", "groups_dealt"}
        whole = isinstance(state, dict) and set(state) == names and all(type(n) is int for n in state.values())
        if not whole or min(state.values()) < 0:
            raise ValueError(f"a sampler's state is round and groups_dealt, at least 0 each; received {state}")
        self.round, self._groups_dealt = state["round"], state["groups_dealt"]
