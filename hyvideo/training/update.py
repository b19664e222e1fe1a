"""One optimizer update: replay every chosen (sample, step) pair with gradients, equalized clipped loss plus KL."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hyvideo.config.schema import Config
from hyvideo.distributed.collectives import average_gradients, gather, whole
from hyvideo.distributed.mesh import Mesh
from hyvideo.grpo.clipped_loss import clipped_policy_loss
from hyvideo.grpo.timesteps import Pairs
from hyvideo.grpo.trust_region import dual_kl, position_kl, velocity_kl
from hyvideo.pipelines.conditioning import Conditioning
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from hyvideo.training.anchor import Anchor
from hyvideo.training.step_gradients import StepGradients
from hyvideo.training.trajectory import Trajectory


@dataclass(frozen=True)
class UpdateStats:
    """Means over the update's (sample, step) pairs of all ranks, unless said otherwise; the same on every rank.

    Attributes:
        policy_loss: clipped, equalized policy loss.
        total_loss: policy loss plus coefficient times KL.
        kl_position: squared distance of policy and anchor means in units of the transition's variance, halved.
        kl_velocity: old minus new log-probability.
        kl: the weighted sum the controller sees.
        clip_fraction: share of pairs whose gradient the clip removed.
        ratio_deviation: largest `|ratio - 1|` over pairs.
        mean_error: largest `|mean - rollout's mean| / std` over pairs and latent elements.
        grad_norm: norm before clipping.
        skipped: the update was not made, because its loss or gradient is not finite.
    """

    policy_loss: float
    total_loss: float
    kl_position: float
    kl_velocity: float
    kl: float
    clip_fraction: float
    ratio_deviation: float
    mean_error: float
    grad_norm: float
    skipped: bool = False


class NonFiniteUpdateError(RuntimeError):
    """Loss or gradient is not finite; the policy was left as it was before the update.

    Args:
        message: what is not finite.
        stats: of the update that was not made.
    """

    def __init__(self, message: str, stats: UpdateStats) -> None:
        super().__init__(message)
        self.stats = stats


@dataclass(frozen=True)
class MicroBatchLoss:
    """Scalars of one micro-batch, on the device; `total_loss` carries the gradient."""

    policy_loss: Tensor
    total_loss: Tensor
    kl_position: Tensor
    kl_velocity: Tensor
    kl: Tensor
    clip_fraction: Tensor
    ratio_deviation: Tensor
    mean_error: Tensor


class PolicyUpdate:
    """Replays a trajectory against the policy and steps the optimizers.

    Args:
        pipeline: holds the policy; the scheduler's steps are set as in the rollout.
        guidance: as in the rollout.
        parameters: the trained parameters by name.
        optimizers: they hold `parameters`.
        anchor: None when no position term is wanted.
        scales: `[K]` factor per step of the policy loss (temporal gradient equalizer), or ones.
        config: the run's configuration.
        mesh: the ranks that make the update together.
    """

    def __init__(
        self,
        pipeline: HunyuanVideoGRPOPipeline,
        guidance: Guidance,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        anchor: Anchor | None,
        scales: Tensor,
        config: Config,
        mesh: Mesh,
    ) -> None:
        self.pipeline = pipeline
        self.guidance = guidance
        self.parameters = list(parameters.values())
        self.optimizers = optimizers
        self.anchor = anchor
        self.scales = scales
        self.config = config
        self.mesh = mesh
        flavour = {"sde_type": config.rollout.sde_type, "eta": config.rollout.eta}
        self.step_gradients = StepGradients(pipeline.scheduler.step_weights(**flavour).velocity)

    def __call__(
        self, trajectory: Trajectory, pairs: Pairs, anchor_means: Tensor | None, coefficient: float
    ) -> UpdateStats:
        """Make one update.

        Args:
            trajectory: B samples.
            pairs: the (sample, step) pairs this update trains; micro-batches are consecutive slices.
            anchor_means: `[B, K, ...]` from the anchor pass; None computes them on the fly or leaves them out.
            coefficient: weight of the KL term.

        Raises:
            NonFiniteUpdateError: loss or gradient is not finite, on any rank; all raise it, no weight was changed.
        """
        losses, weights = [], []
        for micro_batch in self._micro_batches(pairs):
            loss = self._loss(trajectory, micro_batch, anchor_means, coefficient)
            weights.append(len(micro_batch.sample_index) / len(pairs.sample_index))
            # Gradients are averaged over all ranks, but those of ranks that share a video add up to the true one.
            (loss.total_loss * (weights[-1] * self.mesh.sp_size)).backward()
            losses.append(loss)
        average_gradients(self.parameters)
        grad_norm = whole(nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.max_grad_norm))
        stats = _summary(losses, weights, float(grad_norm))
        if not (math.isfinite(stats.grad_norm) and math.isfinite(stats.total_loss)):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            raise NonFiniteUpdateError(
                f"loss {stats.total_loss}, gradient norm {stats.grad_norm}: not finite, the update was not made.",
                replace(stats, skipped=True),
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return stats

    def anchor_means(self, trajectory: Trajectory, updates: Sequence[Pairs]) -> Tensor | None:
        """Return the anchor's means `[B, K, ...]` on the CPU (KL mode `rollout_phase`), 0 where no pair needs one.

        None when there is no anchor or the mode is `training_phase`. While the anchor still equals the policy they are
        the rollout's own means, and nothing is computed. Micro-batches are those of the updates.

        Args:
            trajectory: B samples.
            updates: the (sample, step) pairs of the round's updates.
        """
        if self.anchor is None or self.config.kl.kl_compute_mode == "training_phase":
            return None
        if self.anchor.equals_policy:
            return trajectory.rollout.means
        means = torch.zeros_like(trajectory.rollout.means, device="cpu")
        with torch.no_grad(), self.anchor.in_place_of_policy():
            for rows, index in (part for pairs in updates for part in self._micro_batches(pairs)):
                latents = trajectory.rollout.latents[rows, index]
                means[rows, index] = self._transition(latents, index, trajectory.conditioning_of(rows))[0].cpu()
        return means

    def _micro_batches(self, pairs: Pairs) -> Iterator[Pairs]:
        """Yield consecutive slices of `mini_batch_size_per_update` pairs."""
        size = self.config.grpo.mini_batch_size_per_update
        yield from map(Pairs, pairs.sample_index.split(size), pairs.step_index.split(size))

    def _loss(
        self, trajectory: Trajectory, pairs: Pairs, anchor_means: Tensor | None, coefficient: float
    ) -> MicroBatchLoss:
        """Replay one micro-batch of pairs and return its loss."""
        rows, index = pairs
        rollout, kl = trajectory.rollout, self.config.kl
        conditioning = trajectory.conditioning_of(rows)
        latents = rollout.latents[rows, index]
        anchor_mean = None  # before the policy's pass: its weights must not change between forward and backward
        if self.anchor is not None:
            anchor_mean = self._anchor_mean(anchor_means, rows, index, latents, conditioning)
        mean, std = self._transition(latents, index, conditioning)
        log_probs = self.pipeline.scheduler.log_prob(
            rollout.latents[rows, index + 1], mean, std, sde_type=self.config.rollout.sde_type
        )
        old_log_probs = rollout.log_probs[rows, index]
        policy, diagnostics = clipped_policy_loss(
            log_probs,
            old_log_probs,
            trajectory.advantages[rows].to(log_probs),
            self.config.grpo.clip_range,
            self.scales[index].to(log_probs),
        )
        self.step_gradients.add(policy, mean, index)
        position = mean.new_zeros(()) if anchor_mean is None else position_kl(mean, anchor_mean, std)
        velocity = velocity_kl(old_log_probs, log_probs)
        divergence = position
        if kl.use_dual_kl:
            divergence = dual_kl(position, velocity, kl.dual_kl_moving_weight, kl.dual_kl_step_weight)
        error = ((mean.detach() - rollout.means[rows, index].to(mean)).abs() / std).max()
        return MicroBatchLoss(
            policy_loss=policy.detach(),
            total_loss=policy + coefficient * divergence if kl.kl_weight else policy,
            kl_position=position.detach(),
            kl_velocity=velocity.detach(),
            kl=divergence.detach(),
            clip_fraction=diagnostics.clip_fraction,
            ratio_deviation=diagnostics.ratio_max_deviation,
            mean_error=error,
        )

    def _transition(self, latents: Tensor, index: Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor]:
        """Make the denoising step as the rollout did."""
        settings = self.config.rollout
        return self.pipeline.denoise_step(
            latents, index, conditioning, self.guidance, sde_type=settings.sde_type, eta=settings.eta
        )

    def _anchor_mean(
        self, anchor_means: Tensor | None, rows: Tensor, index: Tensor, latents: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Look the anchor's mean up, or compute it on the fly."""
        if anchor_means is not None:
            return anchor_means[rows, index].to(latents.device)
        with torch.no_grad(), self.anchor.in_place_of_policy():
            return self._transition(latents, index, conditioning)[0]


def _summary(losses: Sequence[MicroBatchLoss], weights: Sequence[float], grad_norm: float) -> UpdateStats:
    """Reduce the scalars of all ranks' micro-batches (equally many on each) with one device synchronisation."""
    names = [field.name for field in fields(MicroBatchLoss)]
    table = (
        torch.stack([torch.stack([getattr(loss, name).detach() for name in names]) for loss in losses]).double().cpu()
    )
    means, maxima = zip(*gather((torch.tensor(weights, dtype=torch.float64) @ table, table.max(0).values)), strict=True)
    mean = dict(zip(names, torch.stack(means).mean(0).tolist(), strict=True))
    largest = dict(zip(names, torch.stack(maxima).max(0).values.tolist(), strict=True))
    extremes = {name: largest[name] for name in ("ratio_deviation", "mean_error")}
    return UpdateStats(**mean | extremes, grad_norm=grad_norm)
