"""GRPO that trains an adapter while it samples: the same gradient as GRPO's, without computing the steps again.

With one update per rollout the weights are still those of the rollout, and every ratio is 1. A video's gradient is then
its advantage times one vector, which is known as soon as the video is sampled: the backward pass follows every step at
once, into one gradient per video, and the update adds them up. Only the steps that are compared with the anchor are
computed again (`anchor_fraction`).

An adapter's gradient is small (255 MB at rank 16), so that there is room for one per video. FSDP would average those of
different videos before their advantages exist: adapters are not sharded, and averaged once in the update.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hyvideo.algorithms.algorithm import Evaluations, micro_batches
from hyvideo.algorithms.grpo import GRPO, ComparedRound
from hyvideo.config.schema import Config
from hyvideo.data.host_reads import upload
from hyvideo.grpo.clipped_loss import normalized_log_ratio
from hyvideo.grpo.timesteps import Pairs


@dataclass(eq=False)
class Video:
    """The gradient of one video with advantage 1, summed up while it is sampled; a `Learner` of the pipeline.

    Attributes:
        steps: those that are trained.
        gradients: of every trained weight; None of one that no step has reached.
        norms: `[K]`, the gradients of the trained steps by their velocities, else 0.
    """

    algorithm: "OnePassGRPO"
    steps: frozenset[int]
    norms: Tensor | None = None
    gradients: list[Tensor | None] = field(default_factory=list)

    def trains(self, index: int) -> bool:
        """Whether a backward pass follows step `index`."""
        return index in self.steps

    def learn(self, index: int, mean: Tensor, std: Tensor, following: Tensor) -> None:
        """Make the backward pass of a step of one video."""
        loss = self.algorithm.loss_of_step(index, mean, std, following)
        norm = self.algorithm.step_gradients.norms(loss, mean, index)
        weights = list(self.algorithm.optimization.parameters.values())
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        if self.norms is None:
            self.norms, self.gradients = mean.new_zeros(len(self.algorithm.scales)), [None] * len(weights)
        self.norms[index] = norm[0]
        for place, (before, gradient) in enumerate(zip(self.gradients, gradients, strict=True)):
            if gradient is not None:
                self.gradients[place] = gradient if before is None else before.add_(gradient)


class OnePassGRPO(GRPO):
    """GRPO for adapters at one update per rollout, whose rollout also makes the backward passes.

    It follows the gradient of `GRPO`, but for rounding. Its rows have no `ratio/*`, `replay/*` and `clip_fraction`,
    because nothing is replayed.
    """

    whole_weights = True

    @classmethod
    def evaluations(cls, config: Config) -> Evaluations:
        """Count what a video costs; a ValueError lists the settings under which it could not be learnt in one pass.

        While weights are sharded, all ranks make their passes together, so that all videos must train the same steps.
        """
        grpo, at_once = config.grpo, config.rollout.rollout_micro_batch_size
        needed = {"use_lora": (config.model.use_lora, True), "updates_per_rollout": (grpo.updates_per_rollout, 1)}
        needed["rollout_micro_batch_size"] = (at_once, 1)
        wrong = [f"{name} {wanted} instead of {given}" for name, (given, wanted) in needed.items() if given != wanted]
        wrong += ["published without first_ratio"] if "first_ratio" in config.rollout.published else []
        wrong += ["offload without weights: the adapter would rest too"] if "weights" in config.parallel.offload else []
        wrong += ["no algorithm_options"] if grpo.algorithm_options else []
        if config.parallel.enable_fsdp and config.rollout.sde_window == "per_group":
            wrong.append("another sde_window than per_group, or enable_fsdp false")
        if config.parallel.enable_fsdp and grpo.timestep_fraction < 1 and grpo.enable_timestep_permutation:
            wrong.append("timestep_fraction 1, or enable_timestep_permutation false, or enable_fsdp false")
        if wrong:
            raise ValueError(f"algorithm grpo_one_pass needs {'; '.join(wrong)}".lower())
        count = super().evaluations(config)
        return replace(count, update=count.anchor, learnt=count.update)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Begin a round: forget the videos of the one before."""
        self._videos: list[Video] = []
        yield

    def learner(self, round_index: int, positions: Tensor, num_videos: int) -> Video:
        """Return what learns from the video at `positions` `[1]`."""
        steps = self.steps_of_round(round_index, num_videos, self.trainable_steps(round_index, num_videos))
        self._videos.append(Video(self, frozenset(steps[positions].flatten().tolist())))
        return self._videos[-1]

    def loss_of_step(self, index: int, mean: Tensor, std: Tensor, following: Tensor) -> Tensor:
        """Return the policy loss of one (video, step) pair with advantage 1; its ratio is 1."""
        self.scales = upload(self.scales, mean.device)
        log_probs = self._log_probs(following, mean, std)
        log_ratio = log_probs - log_probs.detach()
        if self.config.grpo.ratio_norm:
            log_ratio = normalized_log_ratio(mean, mean.detach(), following, std)
        return self._policy_loss(log_ratio, torch.ones_like(log_ratio), index)[0]

    def update(self, compared: ComparedRound, pairs: Pairs, coefficient: float, **how: bool) -> dict[str, float]:
        """Make the update; the passes of the rollout count as the rollout's."""
        computed_again = len(self._compared_again(compared, pairs).sample_index)
        return super().update(compared, pairs, coefficient, **how) | {"update/evaluations": float(computed_again)}

    def _losses(
        self, compared: ComparedRound, pairs: Pairs, coefficient: float, *, on_policy: bool
    ) -> Iterator[tuple[float, Tensor, dict[str, Tensor]]]:
        """Yield what the rollout has learnt, then the position term of the pairs that are compared with the anchor."""
        num_pairs, trajectory, none = len(pairs.sample_index), compared.trajectory, compared.advantages.new_zeros(())
        rows, index = (upload(each, none.device) for each in pairs)
        advantages = compared.advantages[rows]
        norms = torch.stack([video.norms for video in self._videos])[rows, index] * advantages.abs()
        of_penalty = torch.zeros_like(norms) if self.config.kl.kl_weight else None
        self.step_gradients.count(index, norms, torch.ones_like(norms), of_penalty)
        policy_loss = -(advantages * self.scales[index]).mean()
        numbers = {"loss/policy": policy_loss, "loss/total": policy_loss, "advantage/largest": advantages.abs().max()}
        numbers |= {"kl/position": none, "kl/velocity": none, "kl/total": none}
        yield 1.0, self._linear_loss(compared.advantages / num_pairs), numbers
        self._videos.clear()  # gigabytes
        size, numbers = self.config.grpo.mini_batch_size_per_update, dict.fromkeys(numbers, none)
        for part, there in micro_batches(self._compared_again(compared, pairs), size, none.device):
            conditioning = trajectory.conditioning_of(part.sample_index)
            mean, std = self.policy.step(trajectory.rollout.latents[there], there.step_index, conditioning)
            position = self._position(mean, compared.anchor_means[there], std, there.step_index)
            if compared.anchor_weights is not None:
                position = position * float(compared.anchor_weights[part].mean())
            divergence = self.divergence(position, none)
            penalty = coefficient * divergence
            of_penalty = self.step_gradients.norms(penalty, mean, there.step_index)
            nothing = torch.zeros_like(of_penalty)
            self.step_gradients.count(there.step_index, nothing, nothing, of_penalty)
            measured = {"loss/total": penalty, "kl/position": position, "kl/total": divergence}
            yield len(part.sample_index) / num_pairs, penalty, numbers | measured

    def _linear_loss(self, shares: Tensor) -> Tensor:
        """Return a loss whose gradient is the sum of the videos' gradients, each by its share `[B]`."""
        loss = shares.new_zeros(())
        for place, weight in enumerate(self.optimization.parameters.values()):
            of_videos = [(share, video.gradients[place]) for share, video in zip(shares, self._videos, strict=True)]
            known = [share * gradient for share, gradient in of_videos if gradient is not None]
            if known:
                loss = loss + (weight * sum(known)).sum()
        return loss

    def _compared_again(self, compared: ComparedRound, pairs: Pairs) -> Pairs:
        """Return the pairs that have a position term; none while the anchor equals the policy."""
        if self.anchor is None or self.anchor.equals_policy:
            return Pairs(*(each[:0] for each in pairs))
        return pairs if compared.anchor_weights is None else pairs.where(compared.anchor_weights > 0)
