"""GRPO as the paper trains with it: compare the videos of a prompt, replay their steps, follow clipped loss plus KL."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hyvideo.algorithms.algorithm import Algorithm, Evaluations, Trajectory, micro_batches
from hyvideo.algorithms.optimizer import Optimization
from hyvideo.algorithms.policy import Policy, rollout_scheduler
from hyvideo.algorithms.weights_copy import BaseModel, WeightsCopy, copy_policy, starts_at_base
from hyvideo.config.schema import Config
from hyvideo.data.host_reads import host_read, upload
from hyvideo.data.randomness import generator_for
from hyvideo.distributed.collectives import gather
from hyvideo.grpo.clipped_loss import clipped_policy_loss, normalized_log_ratio
from hyvideo.grpo.gradient_equalizer import equalizer_scales
from hyvideo.grpo.kl_controller import KLController
from hyvideo.grpo.timesteps import Pairs, noisy_steps, num_kept, select_timesteps
from hyvideo.grpo.trust_region import dual_kl, position_kl, velocity_kl
from hyvideo.observability.phase_timer import PhaseTimer

DEVIATIONS = ("ratio/max_deviation", "replay/mean_error")
"""How far a replay is from its rollout: the largest over an update, and of a round those of its first update."""


@dataclass(frozen=True)
class ComparedRound:
    """A round as its updates see it.

    Attributes:
        trajectory: B videos.
        advantages: `[B]` on the device, relative to the videos of the same prompt; 0 for a failed score.
        updates: the (video, step) pairs that each update trains.
        anchor_means: `[B, K, ...]`, the anchor's means of those pairs; None without an anchor.
        anchor_weights: `[B, K]` on the CPU, weight of each pair's position term, 0 where it is not compared with the
            anchor (`anchor_fraction`); None: all are 1.
        groups_without_spread: prompt groups of the round whose rewards are all equal.
    """

    trajectory: Trajectory
    advantages: Tensor
    updates: list[Pairs]
    anchor_means: Tensor | None
    anchor_weights: Tensor | None
    groups_without_spread: int


class StepGradients:
    """Sums up an update's gradients by the predicted velocity: of each step's policy loss, and of the KL term.

    `sensitivity` is ``d mean / d v`` of the sampler's steps, `[K]`.
    """

    def __init__(self, sensitivity: Tensor) -> None:
        self._sensitivity = sensitivity.abs().float()
        self._sums: Tensor | None = None

    def add(self, policy_loss: Tensor, penalty: Tensor | None, mean: Tensor, index: Tensor) -> None:
        """Add one micro-batch of N pairs: means of their transitions `[N, ...]`, and their steps `[N]` beside these.

        `policy_loss` is the mean over the pairs, with gradient, and `penalty` lambda times their divergence; None where
        lambda is always 0.
        """
        norms = self.norms(policy_loss, mean, index)
        of_penalty = penalty
        if penalty is not None:
            of_penalty = self.norms(penalty, mean, index) if penalty.requires_grad else torch.zeros_like(norms)
        self.count(index, norms, torch.ones_like(norms), of_penalty)

    def norms(self, loss: Tensor, mean: Tensor, index: int | Tensor) -> Tensor:
        """Gradient of each (sample, step) pair by the predicted velocity, ``sqrt(D) |d loss / d v|``, [N].

        With D values per sample this is ``scale |A| ratio N_t RMS(noise)`` for the policy loss, and 0 where the clip or
        the advantage silences a pair. It costs no pass through the model: the gradient is taken up to the transition's
        mean `[N, ...]`, which is part of the loss's graph. The loss is a mean over the N pairs, with gradient.
        """
        self._sensitivity = upload(self._sensitivity, mean.device)
        (gradient,) = torch.autograd.grad(loss, mean, retain_graph=True)
        per_pair = gradient.flatten(1) * len(mean)
        return per_pair.norm(dim=1) * per_pair.shape[1] ** 0.5 * self._sensitivity[index].to(per_pair)

    def count(self, index: Tensor, norms: Tensor, pairs: Tensor, of_penalty: Tensor | None) -> None:
        """Add N gradients at steps `index`, as of so many `pairs` each; `of_penalty` is of the KL term."""
        parts = torch.stack([norms, pairs] if of_penalty is None else [norms, pairs, of_penalty])
        if self._sums is None:
            self._sums = norms.new_zeros(len(parts), len(self._sensitivity))
        self._sums.index_add_(1, index, parts)

    def pop(self) -> dict[str, float]:
        """Means over the pairs of all ranks since the last pop; every rank must call it.

        Returns:
            ``{"velocity_grad/step_00": norm, ...}`` of the policy loss, after the equalizer, for every step that had
            pairs. Divided by the step's scale: before it. And ``kl/gradient_share``, the KL term's gradient as a share
            of the policy loss's, where there is such a term and something was learnt.
        """
        sums, self._sums = self._sums, None
        with host_read("the gradient of each denoising step, once per update"):
            own = None if sums is None else sums.cpu()
        parts = [part for part in gather(own) if part is not None]
        if not parts:
            return {}
        norms, counts, *penalty = torch.stack(parts).sum(0).tolist()
        means = {
            f"velocity_grad/step_{step:02d}": norm / count
            for step, (norm, count) in enumerate(zip(norms, counts, strict=True))
            if count
        }
        return means | ({"kl/gradient_share": sum(penalty[0]) / sum(norms)} if penalty and sum(norms) else {})


class GRPO(Algorithm):
    """Group relative policy optimization with SAGE's equalizer and dual trust region.

    Attributes:
        anchor: the weights that the position term of the trust region compares with; None where there is no such term.
        refresh_interval: updates after which the anchor follows the policy; 0: never.
        controller: schedule of the KL coefficient; None where `kl_weight` is 0.
        scales: `[K]` factor of each step's policy loss (temporal gradient equalizer), or ones.
        kl_std_scale: `[K]` factor of the position term's standard deviation (`published flow_kl`); None: 1.
    """

    def __init__(self, policy: Policy, optimization: Optimization, config: Config, timer: PhaseTimer) -> None:
        super().__init__(policy, optimization, config, timer)
        kl, kind, published = config.kl, anchor_kind(config), config.rollout.published
        self.anchor: WeightsCopy | None = None
        if kind == "base":
            self.anchor = BaseModel(policy.transformer)
        elif kind == "copy":
            self.anchor = copy_policy(policy.transformer, offload="anchor" in config.parallel.offload)
        self.refresh_interval = kl.update_ref_model_step if config.moves_anchor else 0
        self.controller: KLController | None = None
        if kl.kl_weight:
            self.controller = KLController(
                max_coef=kl.kl_weight,
                min_coef=kl.kl_min_coef,
                start_coef=kl.kl_coef,
                warmup_updates=kl.kl_warmup_updates,
                target=kl.kl_target,
                schedule=kl.kl_schedule,
                published="kl_controller" in published,
            )
        self.kl_std_scale = None
        if "flow_kl" in published and config.rollout.sde_type == "flow_grpo":
            self.kl_std_scale = (-policy.sigmas().diff()).rsqrt()
        norms = policy.gradient_norms(published="cps_equalizer" in published)
        if config.grpo.ratio_norm:  # the normalized ratio's gradient by the velocity; GRPO-Guard divides by the step
            norms = torch.where(norms > 0, policy.sensitivity().abs().to(norms), 0)
        self.scales = equalizer_scales(norms) if config.grpo.use_grad_balancing else torch.ones_like(norms)
        self.step_gradients = StepGradients(policy.sensitivity())

    @classmethod
    def evaluations(cls, config: Config) -> Evaluations:
        """Count what a video costs: every step once, and the trained steps once more per phase."""
        rollout, num_steps = config.rollout, config.rollout.grpo_sampling_steps
        stochastic = rollout_scheduler(rollout).trained_steps(sde_type=rollout.sde_type, eta=rollout.eta)
        noisy, anything = _window(config, stochastic, 0, num_videos=1), torch.Generator()
        steps = select_timesteps(noisy, config.grpo.timestep_fraction, 1, permute=False, generator=anything)
        trained = steps.shape[1]
        anchored = anchor_kind(config) != "none"
        return Evaluations(num_steps, num_kept(config.kl.anchor_fraction, trained) if anchored else 0, trained)

    @classmethod
    def num_copies(cls, config: Config) -> int:
        """Return 1 where the anchor is a copy."""
        return int(anchor_kind(config) == "copy")

    def noisy_steps(self, round_index: int, num_videos: int) -> Tensor | None:
        """Return the window of steps in which each video draws noise; None for all steps."""
        return None if self.config.rollout.sde_window == "all" else self.trainable_steps(round_index, num_videos)

    def trainable_steps(self, round_index: int, num_videos: int) -> Tensor:
        """Return the steps `[N, K]` bool at which each video of a round can be trained."""
        return _window(self.config, self.policy.stochastic_steps(), round_index, num_videos=num_videos)

    def updates(self, trajectory: Trajectory) -> Iterator[dict[str, float]]:
        """Make the round's updates and yield their metrics."""
        compared = self.compare(trajectory)
        replay: dict[str, float] = {}
        for pairs in compared.updates:
            coefficient = self.controller.coefficient if self.controller else 0.0
            metrics = self.update(compared, pairs, coefficient, on_policy=not replay)
            replay = replay or {name: metrics[name] for name in DEVIATIONS if name in metrics}
            yield metrics | replay | self.step_gradients.pop()

    def compare(self, trajectory: Trajectory) -> ComparedRound:
        """Compare the videos of each prompt, choose what every update trains, and make the anchor's pass."""
        advantages, without_spread = self.advantages(trajectory)
        device = trajectory.rollout.latents.device
        advantages, self.scales = upload(advantages, device), upload(self.scales, device)
        if self.kl_std_scale is not None:
            self.kl_std_scale = upload(self.kl_std_scale, device)
        num_videos = len(trajectory.scores.total)
        steps = self.choose_steps(trajectory, self.trainable_steps(trajectory.round, num_videos))
        updates = self.deal(steps)
        weights = self._anchor_weights(trajectory, steps)
        anchored = updates if weights is None else [pairs.where(weights > 0) for pairs in updates]
        with self.timer("anchor"):
            anchor_means = self._anchor_means(trajectory, anchored)
        return ComparedRound(trajectory, advantages, updates, anchor_means, weights, without_spread)

    def update(
        self, compared: ComparedRound, pairs: Pairs, coefficient: float, *, on_policy: bool = False
    ) -> dict[str, float]:
        """Make one optimizer update of (video, step) `pairs`, then advance controller and anchor; return its metrics.

        `coefficient` weighs the KL term. With `on_policy` the weights are still those of the rollout, as in a round's
        first update. Every ratio is then exactly 1, also where other kernels or batch sizes let the replay round
        otherwise than the rollout.
        """
        num_pairs, published = len(pairs.sample_index), self.config.rollout.published
        on_policy = on_policy and "first_ratio" not in published
        losses = self._losses(compared, pairs, coefficient, on_policy=on_policy)
        metrics, step = self.make_update(losses, largest=DEVIATIONS)
        kl = metrics.pop("kl/total")
        if step.made:
            if self.controller:
                # the release moves lambda between micro-batches, by a KL that it reads back from the device each time
                size = self.config.grpo.mini_batch_size_per_update
                for _ in range(math.ceil(num_pairs / size) if "kl_controller" in published else 1):
                    self.controller.update(kl)
            if self.anchor:
                self.anchor.policy_moved()
        if self.anchor and self.refresh_interval and self.optimization.updates % self.refresh_interval == 0:
            self.anchor.refresh()
        return metrics | {
            "kl/coef": coefficient,
            "reward/groups_without_spread": float(compared.groups_without_spread),
            "update/evaluations": float(num_pairs),
        }

    def _losses(
        self, compared: ComparedRound, pairs: Pairs, coefficient: float, *, on_policy: bool
    ) -> Iterator[tuple[float, Tensor, dict[str, Tensor]]]:
        """Yield of every micro-batch its share of the pairs, its loss with gradient and its numbers."""
        device = compared.trajectory.rollout.latents.device
        for part, there in micro_batches(pairs, self.config.grpo.mini_batch_size_per_update, device):
            share = len(part.sample_index) / len(pairs.sample_index)
            yield share, *self._loss(compared, part, there, coefficient, on_policy)

    def _loss(
        self, compared: ComparedRound, pairs: Pairs, there: Pairs, coefficient: float, on_policy: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Replay one micro-batch of pairs; return its loss, with gradient, and its numbers by their public names.

        The pairs are on the host, and `there` on the device.
        """
        rows, index = there
        rollout, kl = compared.trajectory.rollout, self.config.kl
        conditioning = compared.trajectory.conditioning_of(pairs.sample_index)
        latents = rollout.latents[there]
        weights = None if compared.anchor_weights is None else compared.anchor_weights[pairs]
        compares, chosen = weights is None or bool(weights.any()), slice(None)
        if weights is not None and not weights.all():  # rare, for the pairs of a step follow one another
            chosen = upload(weights.nonzero()[:, 0], latents.device)
        mean, std = self.policy.step(latents, index, conditioning)
        following, recorded = rollout.latents[rows, index + 1], rollout.log_probs[there]
        log_probs = self._log_probs(following, mean, std)
        old_log_probs = log_probs.detach() if on_policy else recorded
        log_ratio = log_probs - old_log_probs
        if self.config.grpo.ratio_norm:
            old_mean = mean.detach() if on_policy else rollout.means[there]
            log_ratio = normalized_log_ratio(mean, old_mean, following, std)
        advantages = compared.advantages[rows].to(log_probs)
        policy_loss, clip_fraction = self._policy_loss(log_ratio, advantages, index)
        position = mean.new_zeros(())
        if compared.anchor_means is not None and compares:
            anchor_mean = compared.anchor_means[rows[chosen], index[chosen]]
            position = self._position(mean[chosen], anchor_mean, std[chosen], index[chosen])
        if weights is not None:
            position = position * float(weights.mean())
        # at the rollout's own weights it is 0, and its gradient nothing but the sampled noise
        velocity = velocity_kl(old_log_probs, old_log_probs if on_policy else log_probs)
        divergence = self.divergence(position, velocity)
        penalty = coefficient * divergence if kl.kl_weight else None
        self.step_gradients.add(policy_loss, penalty, mean, index)
        loss = policy_loss if penalty is None else policy_loss + penalty
        return loss, {
            "loss/policy": policy_loss,
            "loss/total": loss,
            "advantage/largest": advantages.abs().max(),
            "kl/position": position,
            "kl/velocity": velocity,
            "kl/total": divergence,
            "clip_fraction": clip_fraction,
            "ratio/max_deviation": ((log_probs.detach() - recorded).exp() - 1).abs().max(),
            "replay/mean_error": ((mean.detach() - rollout.means[there].to(mean)).abs() / std).max(),
        }

    def _log_probs(self, following: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return the log-probability `[N]` of what was drawn, a mean over elements."""
        return self.policy.pipeline.scheduler.log_prob(following, mean, std, sde_type=self.policy.sde_type)

    def _policy_loss(self, log_ratio: Tensor, advantages: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clipped loss of N pairs at steps `index`, weighted by the equalizer, and the share clipped."""
        return clipped_policy_loss(
            log_ratio,
            torch.zeros_like(log_ratio),
            advantages,
            self.config.grpo.clip_range,
            self.scales[index].to(log_ratio),
            clip_range_high=self.config.grpo.clip_range_high,
        )

    def _position(self, mean: Tensor, anchor_mean: Tensor, std: Tensor, index: Tensor) -> Tensor:
        """Return the distance of N pairs from the anchor, their mean."""
        if self.kl_std_scale is not None:
            std = std * self.kl_std_scale[index].to(std).view(-1, *[1] * (std.ndim - 1))
        return position_kl(mean, anchor_mean, std)

    def divergence(self, position: Tensor, velocity: Tensor) -> Tensor:
        """Join the terms of the trust region (paper Eq. 15), each a mean over pairs; override it to weigh them anew.

        They are the distance from the anchor, 0 where there is none, and the step away from the rollout's policy.
        """
        kl = self.config.kl
        if not kl.use_dual_kl:
            return position
        return dual_kl(position, velocity, kl.dual_kl_moving_weight, kl.dual_kl_step_weight)

    def _anchor_weights(self, trajectory: Trajectory, steps: Tensor) -> Tensor | None:
        """Choose which of the trained steps `[B, T]` are compared with the anchor; None where all are.

        They are the same of the T for all videos and ranks, so that all make equally many passes; which steps of the
        schedule these are differs from video to video (`enable_timestep_permutation`). Each weighs as much more as
        fewer are compared, so that the position term has the same mean.
        """
        num_steps = steps.shape[1]
        kept = num_kept(self.config.kl.anchor_fraction, num_steps)
        if self.anchor is None or kept == num_steps:
            return None
        generator = generator_for(self.config.run.seed, "anchor", trajectory.round)
        columns = torch.randperm(num_steps, generator=generator)[:kept]
        return torch.zeros(len(steps), len(self.scales)).scatter_(1, steps[:, columns], num_steps / kept)

    def _anchor_means(self, trajectory: Trajectory, updates: list[Pairs]) -> Tensor | None:
        """Return the anchor's means `[B, K, ...]`, 0 where no pair needs one; None without an anchor.

        While the anchor still equals the policy they are the rollout's own means, and nothing is computed.
        """
        if self.anchor is None:
            return None
        if self.anchor.equals_policy:
            return trajectory.rollout.means
        means = torch.zeros_like(trajectory.rollout.means)
        with torch.no_grad(), self.anchor.in_place_of_policy():
            size = self.config.grpo.mini_batch_size_per_update
            for part, there in (part for pairs in updates for part in micro_batches(pairs, size, means.device)):
                latents, conditioning = trajectory.rollout.latents[there], trajectory.conditioning_of(part.sample_index)
                means[there] = self.policy.step(latents, there.step_index, conditioning)[0]
        return means

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the anchor's weights, where it holds any."""
        anchor = self.anchor.state_dict() if self.anchor else {}
        return {"anchor": anchor} if anchor else {}

    def facts(self) -> dict[str, Any]:
        """Return the controller's state, and whether the anchor equals the policy."""
        return {
            "controller": self.controller.state_dict() if self.controller else None,
            "anchor_equals_policy": self.anchor.equals_policy if self.anchor else None,
        }

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> None:
        """Restore anchor and controller."""
        if self.anchor is not None:
            self.anchor.load_state_dict(tensors.get("anchor", {}), equals_policy=facts["anchor_equals_policy"])
        if self.controller is not None:
            self.controller.load_state_dict(facts["controller"])


def _window(config: Config, stochastic: Tensor, round_index: int, *, num_videos: int) -> Tensor:
    """Choose among the steps that can draw noise, `stochastic` `[K]`, those in which each video of a round does."""
    rollout = config.rollout
    return noisy_steps(
        stochastic,
        rollout.sde_window,
        rollout.sde_window_size,
        num_samples=num_videos,
        num_generations=config.grpo.num_generations,
        round_index=round_index,
        interval=rollout.sde_window_interval,
        generator=generator_for(config.run.seed, "sde_window", round_index),
    )


def anchor_kind(config: Config) -> Literal["none", "base", "copy"]:
    """Return which anchor the position term needs.

    `none` where no position term is wanted, `base` where it is the base model itself (a fixed anchor under a fresh
    adapter), `copy` where it is a second copy of the trained weights.
    """
    kl = config.kl
    if kl.kl_weight == 0 or (kl.use_dual_kl and kl.dual_kl_moving_weight == 0):
        return "none"
    return "base" if starts_at_base(config.model) and not config.moves_anchor else "copy"
