"""Algorithms with a fault that a GPU would punish; a rehearsal has to find each."""

from typing import Any

import torch
from torch import Tensor

from hyvideo.algorithms.algorithm import Trajectory
from hyvideo.algorithms.grpo import GRPO
from hyvideo.distributed.collectives import whole


class ReadsTheLoss(GRPO):
    def _loss(self, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, numbers = super()._loss(*args)
        assert loss.item() == 0
        return loss, numbers


class MixesInTheAnchorPass(GRPO):
    def _anchor_means(self, trajectory: Trajectory, updates: Any) -> Tensor | None:
        means = trajectory.rollout.latents + torch.zeros(trajectory.rollout.latents.shape[-1])
        assert means.shape == trajectory.rollout.latents.shape
        return super()._anchor_means(trajectory, updates)


class CopiesFromPageableMemory(GRPO):
    def _loss(self, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, numbers = super()._loss(*args)
        return loss + torch.zeros(4).to(loss.device).sum(), numbers


class SelectsByHostIndices(GRPO):
    def _loss(self, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, numbers = super()._loss(*args)
        return loss + loss.detach()[None][torch.tensor([0])].sum(), numbers


class SelectsByAMask(GRPO):
    def _loss(self, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, numbers = super()._loss(*args)
        return loss + loss[None][loss[None] > 0].sum(), numbers


class MultipliesInFloat64(GRPO):
    def _loss(self, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, numbers = super()._loss(*args)
        square = loss.detach().double().expand(4, 4)
        return loss + (square @ square).mean().float(), numbers


class FaultyUpdate(ReadsTheLoss, CopiesFromPageableMemory, SelectsByHostIndices, MultipliesInFloat64):
    pass


class GathersTheModel(GRPO):
    def updates(self, trajectory: Trajectory) -> Any:
        gathered = [whole(parameter.detach()) for parameter in self.optimization.parameters.values()]
        yield from super().updates(trajectory)
        assert gathered
