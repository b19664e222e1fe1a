"""What an algorithm is: it says what a rollout must record, and turns a scored round into optimizer updates."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hyvideo.algorithms.optimizer import Optimization, Step
from hyvideo.algorithms.policy import Policy
from hyvideo.config.outside import import_class
from hyvideo.config.schema import Config
from hyvideo.data.host_reads import host_read, upload
from hyvideo.data.randomness import generator_for
from hyvideo.distributed.collectives import gather
from hyvideo.grpo.advantages import gdpo_advantages, group_advantages, groups_without_spread, normalize_then_sum
from hyvideo.grpo.timesteps import Pairs, select_timesteps, split_updates
from hyvideo.models.reward_models.rewards import Scores
from hyvideo.observability.phase_timer import PhaseTimer
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Conditioning, Learner, Rollout

ALGORITHMS = {
    "grpo": "hyvideo.algorithms.grpo:GRPO",
    "grpo_one_pass": "hyvideo.algorithms.one_pass:OnePassGRPO",
    "nft": "hyvideo.algorithms.nft:NFT",
}
"""Name of an algorithm -> the module and class that implement it; another algorithm is one more line."""


@dataclass(frozen=True)
class Trajectory:
    """A scored round: the B videos of this rank, how they were made, and how good all N videos of the round are.

    Attributes:
        round: its number.
        prompts: the B prompt texts.
        positions: `[B]` long, where each of these videos stands among the round's N; the videos of one prompt stand
            next to each other.
        conditioning: one row per unique prompt.
        conditioning_rows: row of `conditioning` of every video, length B.
        rollout: the videos and what was recorded of their denoising steps.
        scores: of all N videos, in the round's order.
        metrics: the round's own numbers, by their names in `metrics.jsonl`.
    """

    round: int
    prompts: tuple[str, ...]
    positions: Tensor
    conditioning: Conditioning
    conditioning_rows: tuple[int, ...]
    rollout: Rollout
    scores: Scores
    metrics: Mapping[str, float]

    def __len__(self) -> int:
        """Number of this rank's videos B."""
        return len(self.prompts)

    def conditioning_of(self, videos: Tensor) -> Conditioning:
        """Return the conditioning of `videos` (LongTensor `[b]`), one row each."""
        return self.conditioning.rows([self.conditioning_rows[i] for i in videos.tolist()])


@dataclass(frozen=True)
class Evaluations:
    """Transformer evaluations per video of a round; guidance makes each of them two rows.

    Attributes:
        rollout: forward passes without gradient that sample the video.
        anchor: those of weights that are compared with the policy; none in a round in which they still equal it.
        update: forward and backward passes, over all updates of the round.
        learnt: those of `rollout` that a backward pass follows at once.
    """

    rollout: int
    anchor: int
    update: int
    learnt: int = 0

    @property
    def trained(self) -> int:
        """Steps of a video that are trained in a round."""
        return self.learnt or self.update


class Algorithm(ABC):
    """Turns scored rounds into updates; subclass it and name the class in `ALGORITHMS`, or with `--algorithm`.

    Attributes:
        needs: what a rollout must record. `transitions`: the SDE's latents, means and log-probabilities of every step;
            `final_latents`: the ODE's last latents alone, `rollout.latents` `[B, 1, ...]`.
        updates_per_round: optimizer updates that `updates` makes of one round. Unless a class sets it, it follows
            `updates_per_rollout`, which is also the number of parts that `deal` makes.
        whole_weights: every rank needs the trained weights, and their gradients, whole. They are not sharded.
    """

    whole_weights: ClassVar[bool] = False
    needs: ClassVar[Literal["transitions", "final_latents"]] = "transitions"
    updates_per_round: int

    def __init__(self, policy: Policy, optimization: Optimization, config: Config, timer: PhaseTimer) -> None:
        self.policy = policy
        self.optimization = optimization
        self.config = config
        self.timer = timer
        if not hasattr(self, "updates_per_round"):
            self.updates_per_round = config.grpo.updates_per_rollout

    @abstractmethod
    def updates(self, trajectory: Trajectory) -> Iterator[dict[str, float]]:
        """Make `updates_per_round` updates by `make_update`; yield the metrics of each, the same on every rank."""

    @classmethod
    def evaluations(cls, config: Config) -> Evaluations:
        """Count what a video costs, for plans: every step once to sample, and once more to train, unless overridden.

        A ValueError says that nothing could be trained with these settings.
        """
        return Evaluations(config.rollout.grpo_sampling_steps, 0, config.rollout.grpo_sampling_steps)

    @classmethod
    def num_copies(cls, config: Config) -> int:
        """Return how many copies of the trained weights the algorithm keeps, for plans."""
        return 0

    def sampling(self) -> AbstractContextManager[None]:
        """Return the context in which rollouts are sampled, for algorithms that do not sample with the policy."""
        return nullcontext()

    def learner(self, round_index: int, positions: Tensor, num_videos: int) -> Learner | None:
        """Return what learns from videos while they are sampled together; None: nothing does.

        They stand at `positions` among the `num_videos` of the round.
        """
        return None

    def noisy_steps(self, round_index: int, num_videos: int) -> Tensor | None:
        """Return which steps draw noise in each of the round's videos, `[num_videos, K]` bool; None: all steps."""
        return None

    def advantages(self, trajectory: Trajectory) -> tuple[Tensor, int]:
        """Compare the videos of each prompt by their rewards, aggregated as `reward_aggregation` says.

        Returns:
            Advantages `[B]` of this rank's videos, 0 for a failed score; prompt groups of the round without spread.
        """
        grpo, scores, aggregation = self.config.grpo, trajectory.scores, self.config.reward.reward_aggregation
        rewards, metrics = scores.total, (scores.weighted(), scores.weights, grpo.num_generations)
        if aggregation != "sum":
            rewards = normalize_then_sum(*metrics)
        if aggregation == "gdpo":
            advantages = gdpo_advantages(*metrics, grpo.adv_clip_max)
        else:
            sizes = (grpo.num_generations, grpo.adv_clip_max)
            advantages = group_advantages(rewards, *sizes, divisor=grpo.advantage_std)
        without_spread = int(groups_without_spread(rewards, grpo.num_generations).sum())
        return advantages[trajectory.positions], without_spread

    def choose_steps(self, trajectory: Trajectory, trainable: Tensor) -> Tensor:
        """Choose the steps `[B, T]` at which this rank's videos are trained, among `trainable` `[K]` or `[N, K]`."""
        return self.steps_of_round(trajectory.round, len(trajectory.scores.total), trainable)[trajectory.positions]

    def steps_of_round(self, round_index: int, num_videos: int, trainable: Tensor) -> Tensor:
        """Choose the steps `[N, T]` at which all N videos of a round are trained; see `choose_steps`."""
        return select_timesteps(
            trainable,
            self.config.grpo.timestep_fraction,
            num_videos,
            permute=self.config.grpo.enable_timestep_permutation,
            generator=generator_for(self.config.run.seed, "timesteps", round_index),
        )

    def deal(self, steps: Tensor) -> list[Pairs]:
        """Deal this rank's videos at the chosen steps `[B, T]` to the updates of the round."""
        grpo = self.config.grpo
        in_group = math.gcd(grpo.num_generations, grpo.batch_size)  # this rank's part of a group lies together
        return split_updates(steps, grpo.updates_per_rollout, num_generations=in_group)

    def make_update(
        self, losses: Iterable[tuple[float, Tensor, Mapping[str, Tensor]]], *, largest: Collection[str] = ()
    ) -> tuple[dict[str, float], Step]:
        """Make one optimizer update and time it as `update`; every rank calls it.

        Args:
            losses: of this rank's micro-batches, computed one after the other: their shares of its part of the update,
                which add up to 1, their losses with gradient, and their numbers, among them `loss/total`. Where all
                ranks' `advantage/largest` is 0, as in groups of equal scores, nothing can be learnt and the weights
                stay.
            largest: numbers reduced by their maximum; all others by their mean.

        Returns:
            The numbers over all ranks and those of the step, by their names in `metrics.jsonl`; and the step.
        """
        measured, weights = [], []
        with self.timer("update"):
            for share, loss, numbers in losses:
                self.optimization.backward(loss, share)
                measured.append(numbers)
                weights.append(share)
            metrics = over_micro_batches(measured, weights, largest={*largest, "advantage/largest"})
            signal = metrics.get("advantage/largest") != 0 or "idle_updates" in self.config.rollout.published
            step = self.optimization.step(metrics["loss/total"], signal=signal)
        return metrics | step.metrics(), step

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the algorithm's state in named groups, sharded as the policy's are."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return the rest of the algorithm's state, as JSON can write it."""
        return {}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore what `tensors` and `facts` returned."""


def algorithm_class(name: str) -> type[Algorithm]:
    """Find an algorithm by its name, or by the import path `module:Class` of one's own; a ValueError if it is none."""
    if name not in ALGORITHMS and ":" not in name:
        raise ValueError(
            f"algorithm: there is no {name!r}; expected one of {', '.join(ALGORITHMS)}, or module:Class of your own."
        )
    return import_class("algorithm", ALGORITHMS.get(name, name), Algorithm)


def micro_batches(pairs: Pairs, size: int, device: torch.device) -> list[tuple[Pairs, Pairs]]:
    """Cut the pairs of an update into micro-batches: each on the host, which counts with them, and on `device`.

    They are uploaded together, so that the host waits at none of them.
    """
    there = Pairs(*(upload(index, device) for index in pairs))
    return list(zip(pairs.micro_batches(size), there.micro_batches(size), strict=True))


def over_micro_batches(
    measured: Sequence[Mapping[str, Tensor]], weights: Sequence[float], *, largest: Collection[str] = ()
) -> dict[str, float]:
    """Reduce the numbers of all ranks' micro-batches with one read from the device: means, or the `largest` ones.

    `measured` has scalars of each of this rank's micro-batches, with the same names everywhere, and `weights` the share
    of each in this rank's part of the update; they add up to 1.
    """
    names = list(measured[0])
    table = torch.stack([torch.stack([part[name].detach() for name in names]) for part in measured]).double()
    with host_read("the numbers of an update, once when all its micro-batches are done"):
        table = table.cpu()
    means, maxima = zip(*gather((torch.tensor(weights, dtype=torch.float64) @ table, table.max(0).values)), strict=True)
    mean, maximum = torch.stack(means).mean(0).tolist(), torch.stack(maxima).max(0).values.tolist()
    return {name: maximum[i] if name in largest else mean[i] for i, name in enumerate(names)}
