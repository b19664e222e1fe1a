"""DiffusionNFT (arXiv 2509.16117): flow matching that follows good videos and shuns bad ones, without likelihoods."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyvideo.algorithms.algorithm import Algorithm, Evaluations, Trajectory, micro_batches
from hyvideo.algorithms.optimizer import Optimization
from hyvideo.algorithms.policy import Policy
from hyvideo.algorithms.weights_copy import BaseModel, WeightsCopy, copy_policy, starts_at_base
from hyvideo.config.schema import Config
from hyvideo.data.host_reads import upload
from hyvideo.data.randomness import generator_for
from hyvideo.grpo.timesteps import Pairs, num_kept
from hyvideo.observability.phase_timer import PhaseTimer
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import draw

LEAST_ERROR = 1e-5
"""Smallest mean error that the adaptive weighting divides by."""


Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NFTOptions:
    """What `algorithm_options` sets for NFT, such as `old_ramp=0.2 kl_weight=0.1`."""

    beta: Annotated[float, Field(gt=0)] = 1.0
    """Distance between the policy and the implicit good and bad ones, > 0. A smaller value learns more from each step.
    The release has 0.1 to 1."""

    adaptive_weighting: bool = True
    """Compare predicted clean latents and divide by their mean error, instead of comparing velocities."""

    old_ramp: Share = 0.001
    """After a round the old policy, which samples, becomes a mean of itself and the policy. Its own weight in it is
    this number, in [0, 1], times the updates made so far, at most `old_decay`. 0 copies the policy. The release has
    0.001, and for some rewards a faster ramp that begins later."""

    old_decay: Share = 0.5
    """Largest share of itself that the old policy keeps, in [0, 1]. The release has 0.5, or 0.999."""

    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared distance to the base model's velocity, >= 0. It costs one more pass, and without a fresh
    adapter one more copy of the weights. The release has 1e-4."""

    @classmethod
    def of(cls, config: Config) -> "NFTOptions":
        """Read the options of a run; a ValueError for an unknown name, or a value of the wrong type or range."""
        try:
            return TypeAdapter(cls).validate_python(config.grpo.algorithm_options or {})
        except ValidationError as error:
            known = ", ".join(field.name for field in fields(cls))
            said = [f"{fault['loc'][0]}: {fault['msg']}, received {fault['input']}" for fault in error.errors()]
            raise ValueError(f"algorithm_options: {'; '.join(said)}. nft has {known}.") from error


def optimality(advantages: Tensor, clip_max: float) -> Tensor:
    """``r = 1/2 + clip(A / clip_max, -1, 1) / 2``: how likely each video is a good one (Section 3.3), `[B]` in [0, 1].

    A video with the advantage `clip_max` is surely good.
    """
    return 0.5 + 0.5 * (advantages / clip_max).clamp(-1, 1)


def nft_losses(
    velocity: Tensor, old_velocity: Tensor, noised: Tensor, clean: Tensor, sigma: Tensor, *, beta: float, adaptive: bool
) -> tuple[Tensor, Tensor]:
    """Return the flow-matching errors of the implicit good and bad policies (Eq. 5), `[N]` each.

    ``v_good = (1 - beta) v_old + beta v`` and ``v_bad = (1 + beta) v_old - beta v`` predict ``(noised - clean) /
    sigma``. With ``adaptive`` their clean latents ``noised - sigma v`` are compared instead, and the squared error is
    divided by the mean absolute one, which has no gradient (Section 3.3).

    Args:
        velocity: `[N, ...]` of the policy, with gradient.
        old_velocity: `[N, ...]` of the old policy, without.
        noised: `[N, ...]`, ``(1 - sigma) clean + sigma noise``.
        clean: `[N, ...]` final latents of the videos.
        sigma: `[N, 1, ...]` noise levels in (0, 1].
        beta: how far the two policies lie from the old one.
        adaptive: see above.
    """
    losses = []
    for implicit in ((1 - beta) * old_velocity + beta * velocity, (1 + beta) * old_velocity - beta * velocity):
        error = noised - sigma * implicit - clean if adaptive else implicit - (noised - clean) / sigma
        loss = error.square().flatten(1).mean(1)
        size = error.detach().abs().flatten(1).mean(1).clamp(min=LEAST_ERROR) if adaptive else 1.0
        losses.append(loss / size)
    return losses[0], losses[1]


class NFT(Algorithm):
    """Negative-aware fine-tuning: the old policy samples with the ODE, and the policy moves from bad to good videos.

    Every velocity, in sampling and in the loss, has the rollout's guidance. The paper trains without (`cfg_scale` 1).

    Attributes:
        anchor: the old policy, which follows the policy after every round.
        base: the base model, for the KL term; None where the option `kl_weight` is 0.
    """

    needs = "final_latents"

    def __init__(self, policy: Policy, optimization: Optimization, config: Config, timer: PhaseTimer) -> None:
        super().__init__(policy, optimization, config, timer)
        self.options, self._sigmas = NFTOptions.of(config), policy.sigmas()
        offload, transformer = "anchor" in config.parallel.offload, policy.transformer
        self.anchor = copy_policy(transformer, offload=offload)
        self.base: WeightsCopy | None = None
        if self.options.kl_weight:
            fresh = starts_at_base(config.model)
            self.base = BaseModel(transformer) if fresh else copy_policy(transformer, offload=offload)

    @classmethod
    def evaluations(cls, config: Config) -> Evaluations:
        """Count what a video costs: the trained steps once more for the old policy, and for the base model."""
        num_steps = config.rollout.grpo_sampling_steps
        trained = num_kept(config.grpo.timestep_fraction, num_steps)
        return Evaluations(num_steps, trained * (1 + bool(NFTOptions.of(config).kl_weight)), trained)

    @classmethod
    def num_copies(cls, config: Config) -> int:
        """Return 1 for the old policy, and 1 more where the base model needs a copy too."""
        return 1 + (NFTOptions.of(config).kl_weight > 0 and not starts_at_base(config.model))

    def sampling(self) -> AbstractContextManager[None]:
        """Let the old policy sample."""
        return nullcontext() if self.anchor.equals_policy else self.anchor.in_place_of_policy()

    def updates(self, trajectory: Trajectory) -> Iterator[dict[str, float]]:
        """Make the round's updates and yield their metrics; after the last one the old policy follows."""
        advantages, without_spread = self.advantages(trajectory)
        device = trajectory.rollout.latents.device
        optimal = upload(optimality(advantages, self.config.grpo.adv_clip_max), device)
        scored = upload(~trajectory.scores.total[trajectory.positions].isnan(), device)
        every = torch.ones(self.config.rollout.grpo_sampling_steps, dtype=torch.bool)  # any of the schedule's steps
        size = self.config.grpo.mini_batch_size_per_update
        dealt = self.deal(self.choose_steps(trajectory, every))
        updates = [micro_batches(pairs, size, device) for pairs in dealt]
        self._sigmas = upload(self._sigmas, device)
        with self.timer("anchor"):
            old = self._velocities(self.anchor, trajectory, updates, skip_first=self.anchor.equals_policy)
            base = self._velocities(self.base, trajectory, updates) if self.base else {}
        for number, parts in enumerate(updates):
            total = len(dealt[number].sample_index)
            losses = (
                (
                    len(both[0].sample_index) / total,
                    *self._loss(trajectory, both, old.get((number, part)), base.get((number, part)), optimal, scored),
                )
                for part, both in enumerate(parts)
            )
            metrics, step = self.make_update(losses)
            if step.made:
                self.anchor.policy_moved()
            decay = min(self.options.old_ramp * self.optimization.updates, self.options.old_decay)
            if number == len(updates) - 1:
                self.anchor.refresh(decay)
            yield metrics | {
                "nft/old_decay": decay,
                "reward/groups_without_spread": float(without_spread),
                "update/evaluations": float(total),
            }

    def _loss(
        self,
        trajectory: Trajectory,
        both: tuple[Pairs, Pairs],
        old_velocity: Tensor | None,
        base_velocity: Tensor | None,
        optimal: Tensor,
        scored: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch, with gradient, and its numbers by their public names.

        The factor is the release's: at the old policy the gradient is that of ``A (v - target)^2``, whatever beta and
        adv_clip_max are. A video without a score has no influence.
        """
        nft, clip_max, (rows, _) = self.options, self.config.grpo.adv_clip_max, both[1]
        velocity, noised, clean, sigma = self._velocity(trajectory, *both)
        old_velocity = velocity.detach() if old_velocity is None else old_velocity
        good, bad = nft_losses(
            velocity, old_velocity, noised, clean, sigma, beta=nft.beta, adaptive=nft.adaptive_weighting
        )
        r, counts = optimal[rows].to(good), scored[rows].to(good)
        loss = policy_loss = clip_max / nft.beta * (counts * (r * good + (1 - r) * bad)).mean()
        numbers = {"nft/old_distance": (velocity - old_velocity).square().mean()}
        numbers["advantage/largest"] = clip_max * (counts * (2 * r - 1).abs()).max()
        numbers |= {"nft/good_error": good.mean(), "nft/bad_error": bad.mean()}
        if base_velocity is not None:
            distance = (velocity - base_velocity).square().mean()
            loss = policy_loss + nft.kl_weight * distance
            numbers["nft/base_distance"] = distance
        return loss, {"loss/policy": policy_loss, "loss/total": loss, **numbers}

    def _velocity(self, trajectory: Trajectory, pairs: Pairs, there: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the velocity at some pairs, their noised and clean latents `[N, ...]` and noise levels `[N, 1, ...]`.

        The pairs are on the host, and `there` on the device. The noise of a pair depends on the video and the step
        alone, so that all passes see the same.
        """
        clean = trajectory.rollout.latents[there.sample_index, -1]
        places = trajectory.positions[pairs.sample_index].tolist()
        generators = [
            generator_for(self.config.run.seed, "nft", trajectory.round, place, step=step)
            for place, step in zip(places, pairs.step_index.tolist(), strict=True)
        ]
        noise = draw(generators, clean.shape[1:], clean.device)
        sigma = self._sigmas[there.step_index].view(-1, *[1] * (clean.ndim - 1))
        noised = (1 - sigma) * clean + sigma * noise
        velocity = self.policy.velocity(noised, there.step_index, trajectory.conditioning_of(pairs.sample_index))
        return velocity, noised, clean, sigma

    @torch.no_grad()
    def _velocities(
        self,
        weights: WeightsCopy,
        trajectory: Trajectory,
        updates: list[list[tuple[Pairs, Pairs]]],
        *,
        skip_first: bool = False,
    ) -> dict[tuple[int, int], Tensor]:
        """Return the velocities of other weights, by the numbers of update and micro-batch.

        With `skip_first` those of the first update are left out: it computes them itself, with the same weights.
        """
        velocities, asked = {}, list(enumerate(updates))[skip_first:]
        with weights.in_place_of_policy() if asked else nullcontext():
            for number, parts in asked:
                for part, both in enumerate(parts):
                    velocities[number, part] = self._velocity(trajectory, *both)[0]
        return velocities

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights of the old policy, and of the base model where it is a copy."""
        base = self.base.state_dict() if self.base else {}
        return {"anchor": self.anchor.state_dict()} | ({"base": base} if base else {})

    def facts(self) -> dict[str, Any]:
        """Return whether the old policy equals the policy."""
        return {"anchor_equals_policy": self.anchor.equals_policy}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> None:
        """Restore the old policy and the base model."""
        self.anchor.load_state_dict(tensors["anchor"], equals_policy=facts["anchor_equals_policy"])
        if self.base:
            self.base.load_state_dict(tensors.get("base", {}), equals_policy=False)
