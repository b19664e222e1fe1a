"""The rounds of a run, one after another: which videos this rank samples, and what seeds their noise."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hyvideo.config.schema import Config
from hyvideo.data.prompts import Prompt
from hyvideo.data.samplers import Assignment, GroupSampler
from hyvideo.distributed.mesh import Mesh, RoundLayout


@dataclass(frozen=True)
class Round:
    """What this rank samples in one round.

    Attributes:
        index: number of the round.
        videos: prompt and generation of each of this rank's B videos.
        prompts: their prompts.
        positions: `[B]` long, where each stands among the round's videos; those of one prompt stand next to each other.
        num_videos: videos of all ranks.
        num_generations: videos per prompt.
        seed: the run's; with the round, the prompt and the generation it seeds a video's noise.
        share_initial_noise: whether the videos of a prompt start from the same noise.
    """

    index: int
    videos: Sequence[Assignment]
    prompts: Sequence[Prompt]
    positions: Tensor
    num_videos: int
    num_generations: int
    seed: int
    share_initial_noise: bool


class Rounds:
    """Deals this rank's part of round after round; the position of its sampler is all there is to save.

    Args:
        config: layout of a round, seed and noise.
        prompts: all training prompts.
        mesh: the ranks.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt], mesh: Mesh) -> None:
        grpo = config.grpo
        self.prompts = prompts
        self.layout = RoundLayout(grpo.batch_size, mesh.dp_size, grpo.gradient_accumulation_steps)
        self.sampler = GroupSampler(
            num_prompts=len(prompts),
            batch_size=grpo.batch_size,
            num_generations=grpo.num_generations,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            seed=config.run.seed,
        )
        self._config = config

    def next(self) -> Round:
        """Return the next round, and move on."""
        config, sampler = self._config, self.sampler
        index = sampler.round
        videos = sampler.next_round(config.grpo.gradient_accumulation_steps)
        return Round(
            index=index,
            videos=videos,
            prompts=[self.prompts[video.prompt_index] for video in videos],
            positions=self.layout.positions(sampler.dp_rank),
            num_videos=self.layout.num_videos,
            num_generations=config.grpo.num_generations,
            seed=config.run.seed,
            share_initial_noise=config.rollout.use_same_noise,
        )
