"""The rounds of a run, one after another: which videos this rank samples, and what seeds their noise."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hyvideo.config.schema import Config
from hyvideo.data.prompts import Prompt
from hyvideo.data.samplers import Assignment, GroupSampler
from hyvideo.distributed.layout import Layout


@dataclass(frozen=True)
class Round:
    """What this rank samples in one round.

    Attributes:
        videos, prompts: prompt and generation of each of this rank's B videos.
        positions: `[B]` long, where each stands among the round's videos; those of one prompt stand next to each other.
        num_videos: videos of all ranks.
        num_generations: videos per prompt.
        seed: the run's; with the round, the prompt and the generation it seeds a video's noise.
        share_initial_noise: whether the videos of a prompt start from the same noise.
        repeat_initial_noise: whether a prompt's videos start from the same noise as in other rounds.
    """

    index: int
    videos: Sequence[Assignment]
    prompts: Sequence[Prompt]
    positions: Tensor
    num_videos: int
    num_generations: int
    seed: int
    share_initial_noise: bool
    repeat_initial_noise: bool


class Rounds:
    """Deals a data-parallel rank's part of round after round; its sampler's position is all there is to save."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], layout: Layout, dp_rank: int) -> None:
        self.prompts, self.layout, self.positions = prompts, layout, layout.positions(dp_rank)
        self._seed, self._rollout = config.run.seed, config.rollout
        sizes = (len(prompts), layout.num_groups, layout.num_generations)
        self.sampler = GroupSampler(*sizes, self.positions, self._seed)

    def next(self) -> Round:
        """Return the next round, and move on."""
        index, videos = self.sampler.round, self.sampler.next_round()
        return Round(
            index=index,
            videos=videos,
            prompts=[self.prompts[video.prompt_index] for video in videos],
            positions=self.positions,
            num_videos=self.layout.num_videos,
            num_generations=self.layout.num_generations,
            seed=self._seed,
            share_initial_noise=self._rollout.use_same_noise,
            repeat_initial_noise=self._rollout.initial_noise == "per_prompt",
        )
