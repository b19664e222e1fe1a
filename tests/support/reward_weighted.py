"""An algorithm of one's own, as a user would write it outside the package: learn the better videos again."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hyvideo.algorithms.algorithm import Algorithm, Trajectory
from hyvideo.data.randomness import generator_for
from hyvideo.grpo.advantages import group_advantages


class RewardWeighted(Algorithm):
    """Flow matching on the final latents of the videos that beat their group, by how much they beat it."""

    needs = "final_latents"
    updates_per_round = 1

    def updates(self, trajectory: Trajectory) -> Iterator[dict[str, float]]:
        metrics, _ = self.make_update(self._losses(trajectory))
        yield metrics

    def _losses(self, trajectory: Trajectory) -> Iterator[tuple[float, Tensor, dict[str, Tensor]]]:
        grpo, seed = self.config.grpo, self.config.run.seed
        weights = group_advantages(trajectory.scores.total, grpo.num_generations)[trajectory.positions].clamp(min=0)
        for video, position in enumerate(trajectory.positions.tolist()):
            generator = generator_for(seed, "reward_weighted", trajectory.round, position)
            clean = trajectory.rollout.latents[video : video + 1, -1]
            noise = torch.randn(clean.shape, generator=generator)
            index = int(torch.randint(len(self.policy.sigmas()) - 1, (), generator=generator))
            sigma = self.policy.sigmas()[index]
            conditioning = trajectory.conditioning_of(torch.tensor([video]))
            velocity = self.policy.velocity((1 - sigma) * clean + sigma * noise, index, conditioning)
            loss = weights[video] * (velocity - (noise - clean)).square().mean()
            yield 1 / len(trajectory), loss, {"loss/total": loss}
