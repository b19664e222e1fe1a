"""The rounds of a run, one after another: which videos this rank samples, and their noise."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hyvideo.config.schema import Config
from hyvideo.data.prompts import Prompt
from hyvideo.data.samplers import GroupSampler
from hyvideo.distributed.layout import layout_of
from hyvideo.distributed.mesh import Mesh
from hyvideo.pipelines.noise import SampleNoise


@dataclass(frozen=True)
class Round:
    """What this rank samples in one round.

    Attributes:
        prompts: of each of this rank's B videos.
        prompt_indices: positions of these prompts among the run's.
        positions: `[B]` long, where each stands among the round's videos; those of one prompt stand next to each other.
        noise: of the B videos.
        num_videos: videos of all ranks.
        num_generations: videos per prompt.
        mesh: the ranks that make the round together.
    """

    index: int
    prompts: Sequence[Prompt]
    prompt_indices: Sequence[int]
    positions: Tensor
    noise: SampleNoise
    num_videos: int
    num_generations: int
    mesh: Mesh


class Rounds:
    """Deals a data-parallel rank's part of round after round; its sampler's position is all there is to save.

    Attributes:
        current: the round that `next` returned last.
    """

    current: Round

    def __init__(self, config: Config, prompts: Sequence[Prompt], mesh: Mesh) -> None:
        self.prompts, self.mesh, self.layout = prompts, mesh, layout_of(config, mesh.world_size)
        self.positions = self.layout.positions(mesh.dp_rank)
        self._seed, self._rollout = config.run.seed, config.rollout
        sizes = (len(prompts), self.layout.num_groups, self.layout.num_generations)
        self.sampler = GroupSampler(*sizes, self.positions, self._seed)

    def next(self) -> Round:
        """Return the next round, and move on."""
        index, videos = self.sampler.round, self.sampler.next_round()
        prompts = [video.prompt_index for video in videos]
        noise = SampleNoise(
            seeds=[self._seed] * len(videos),
            stream="rollout",
            round=index,
            prompts=prompts,
            generations=[video.generation for video in videos],
            share_initial=self._rollout.use_same_noise,
            repeat_initial=self._rollout.initial_noise == "per_prompt",
        )
        self.current = Round(
            index=index,
            prompts=[self.prompts[prompt] for prompt in prompts],
            prompt_indices=prompts,
            positions=self.positions,
            noise=noise,
            num_videos=self.layout.num_videos,
            num_generations=self.layout.num_generations,
            mesh=self.mesh,
        )
        return self.current
