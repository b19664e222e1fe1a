"""Which videos each rank samples: every prompt num_generations times across ranks, in an order computed, not stored."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.data.randomness import seed_for


@dataclass(frozen=True)
class Assignment:
    """One video to sample: with the round, its two numbers identify it, and thereby its noise."""

    prompt_index: int  # position of the prompt in the list of training prompts
    generation: int  # number of the video among those of its prompt in this round, from 0


class GroupSampler:
    """Deals prompt groups to data-parallel ranks, round after round.

    The videos of a round are numbered across all ranks, and each run of `num_generations` numbers is one group. The
    prompts of an epoch come in a permutation seeded by (seed, epoch); where an epoch ends within a round, the next one
    begins in the same round.

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
        num_prompts, num_groups: prompts in all, and groups of a round over all ranks.
        num_generations: group size.
        positions: where in the round this rank's videos stand (`hyvideo.distributed.mesh.Layout.positions`).
        seed: of the run.
    """

    def __init__(self, num_prompts: int, num_groups: int, num_generations: int, positions: Tensor, seed: int) -> None:
        self.num_prompts, self.num_groups, self.num_generations = num_prompts, num_groups, num_generations
        self.positions, self.seed = positions.tolist(), seed
        self.round = 0
        """Number of the round that `next_round` deals next."""
        self._groups_dealt = 0

    def next_round(self) -> list[Assignment]:
        """Return this rank's videos of the next round, and move on by one round."""
        epoch, start = divmod(self._groups_dealt, self.num_prompts)
        prompts: list[int] = []  # of this epoch and, where the round goes beyond it, of the next ones
        while len(prompts) < start + self.num_groups:
            generator = torch.Generator().manual_seed(seed_for(self.seed, "prompt_order", epoch))
            prompts += torch.randperm(self.num_prompts, generator=generator).tolist()
            epoch += 1
        self.round += 1
        self._groups_dealt += self.num_groups
        earlier: Counter[int] = Counter()
        videos = []
        for prompt in prompts[start : start + self.num_groups]:
            first = earlier[prompt]
            earlier[prompt] += self.num_generations
            videos += [Assignment(prompt, generation) for generation in range(first, earlier[prompt])]
        return [videos[position] for position in self.positions]

    def state_dict(self) -> dict[str, int]:
        """The position: rounds and groups dealt. The same on all ranks, and valid for another number of ranks."""
        return {"round": self.round, "groups_dealt": self._groups_dealt}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position of `state`."""
        self.round, self._groups_dealt = state["round"], state["groups_dealt"]
