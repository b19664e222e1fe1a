"""Forecast what a training will gain, from a few rounds without an update and trial steps along their gradients."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyvideo.algorithms.algorithm import Algorithm, Trajectory
from hyvideo.algorithms.anchor import Anchor, copy_policy
from hyvideo.algorithms.grpo import GRPO
from hyvideo.algorithms.optimizer import NonFiniteUpdateError, Optimization, Step, build_optimizers
from hyvideo.config.schema import Config
from hyvideo.data.prompts import Prompt
from hyvideo.distributed.collectives import average_gradients, gather, whole
from hyvideo.evaluation.intervals import Interval
from hyvideo.grpo.advantages import groups_without_spread
from hyvideo.grpo.timesteps import Pairs
from hyvideo.training.collect import collect, gain_over
from hyvideo.training.outlook import Outlook, outlook_of, walk
from hyvideo.training.run import Training
from hyvideo.training.warnings_about_settings import is_usual_noise, noise_left

Gradient = dict[str, Tensor]
"""Gradient of every trained parameter by name, sharded as the parameter is."""

FACTORS = (1 / 3, 1.0, 3.0)
"""Learning rates that are tried unless others are given, as multiples of the configured one."""


@dataclass(frozen=True)
class Groups:
    """How the rewards of the sampled rounds differ within prompt groups, which is all that training can learn from.

    Attributes:
        spread: standard deviation of the reward within a group, on average.
        share: of the reward's variance that lies within groups; the rest is how hard the prompts are.
        dead: share of groups whose rewards are all equal.
        best: how much more the best video of a group scores than the group's mean, on average.
    """

    spread: float
    share: float
    dead: float
    best: float


@dataclass(frozen=True)
class Agreement:
    """How far the gradients of independent halves agree, for one denoising step or for all.

    Only their signs are compared. Adam follows signs rather than sizes, and a few large elements would hide the rest.

    Attributes:
        correlation: of the two gradients, if both are normal: the share of signal in the variance of one.
        videos: number at which a gradient holds as much signal as noise; infinite where no signal was seen.
    """

    correlation: float
    videos: float

    @classmethod
    def of(cls, products: Tensor, num_videos: float) -> "Agreement":
        """Measure it from the inner products `[2, 2]` of the signs of two gradients, of `num_videos` each.

        Two normal variables of correlation c have a mean product of signs of ``2 / pi asin(c)``.
        """
        size = float(products.diagonal().mean())
        correlation = math.sin(math.pi / 2 * float(products[0, 1]) / size) if size > 0 else 0.0
        return cls(correlation, num_videos * (1 - correlation) / correlation if correlation > 0 else math.inf)


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run.

    Attributes:
        updates: number left in the run, over which the gains are expected.
        videos: number in the gradient of one update.
        base_std: standard deviation of the held-out rewards before training; NaN where they are all equal.
        groups: how rewards differ within groups.
        gradient: agreement of the halves.
        steps: agreement by denoising step; empty where an algorithm's loss is not a sum over steps.
        noise: excess on the way and standard deviation left in the finished latents of an SDE; None for an ODE.
        ode_gap: what the rounds' videos would score more without the sampler's noise; None for an ODE.
        outlooks: one per learning rate, in their order.
        held_out: rewards behind the outlooks: `base` `[N]`, and for each rate `[2, 2, N]`: halves, steps up and down.
    """

    updates: int
    videos: float
    base_std: float
    groups: Groups
    gradient: Agreement
    steps: Mapping[int, Agreement]
    noise: tuple[float, float] | None
    ode_gap: float | None
    outlooks: Sequence[Outlook]
    held_out: Mapping[str, list] = field(repr=False, default_factory=dict)

    def in_base_std(self, gain: Interval) -> str:
        """Write a gain in standard deviations of the base model's held-out rewards."""
        low, high = gain.low / self.base_std, gain.high / self.base_std
        return f"{gain.mean / self.base_std:+.2f} base std [{low:+.2f}, {high:+.2f}]"

    @property
    def is_noisy(self) -> bool:
        """Whether the sampler leaves more noise than usual, and that costs half a standard deviation of the reward."""
        return self.noise is not None and self.ode_gap > self.base_std / 2 and not is_usual_noise(*self.noise)

    @property
    def best(self) -> Outlook:
        """The outlook with the largest gain, before any whose gain is NaN."""
        return max(self.outlooks, key=lambda one: -math.inf if math.isnan(one.gain.mean) else one.gain.mean)

    def at(self, rate: float) -> Outlook | None:
        """Return the outlook of a learning rate; None where it was not tried."""
        return next((outlook for outlook in self.outlooks if math.isclose(outlook.rate, rate)), None)


class GradientCollector(Optimization):
    """Sums the gradients of an algorithm's updates instead of following them, so that no weight changes."""

    def __init__(self, optimization: Optimization, config: Config) -> None:
        super().__init__(optimization.parameters, config.optimizer, sp_size=config.parallel.sp_size)
        self.collected: Gradient = {}

    def step(self, loss: float, *, signal: bool = True) -> Step:
        """Average the gradient over ranks, add it to what was collected, and skip the update.

        Raises:
            NonFiniteUpdateError: loss or gradient is not finite; all ranks raise it.
        """
        average_gradients(self.parameters.values())
        norm = float(whole(nn.utils.clip_grad_norm_(self.parameters.values(), math.inf)))  # which clips nothing
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self._zero_grad()
            raise NonFiniteUpdateError(
                f"the gradient of a forecast's round must be finite; received loss {loss} and gradient norm {norm}. "
                "Training would skip this update or stop at it: look for what is not finite, such as a damaged "
                "checkpoint or a reward far too large, before you forecast."
            )
        reached = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        add(self.collected, {name: gradient.detach().clone() for name, gradient in reached.items()})
        self._zero_grad()
        return Step(math.nan, 0.0, skipped=True)

    def pop(self, factor: float = 1.0) -> Gradient:
        """Return what was collected since the last time, times `factor`."""
        collected, self.collected = self.collected, {}
        return {name: gradient * factor for name, gradient in collected.items()}


def forecast(
    training: Training,
    prompts: Sequence[Prompt],
    *,
    num_rounds: int = 6,
    rates: Sequence[float] = (),
    say: Callable[[str], None] = lambda message: None,
) -> Forecast:
    """Forecast a training that has validation; the policy is afterwards what it was. Every rank calls it.

    Besides the run's own memory it takes that of `num_rounds` rounds, of 4 gradients, of a copy of the trained weights,
    and of a copy of the weights that an algorithm such as NFT keeps.

    Args:
        training: the run as it begins, or goes on.
        prompts: N held-out prompts.
        num_rounds: rounds to sample, an even number; one alone may teach several times as much as another.
        rates: learning rates to try; the configured one and a third and three times of it unless given.
        say: told what is done next.

    Raises:
        ValueError: the run has no updates left.
        NonFiniteUpdateError: a round's loss or gradient is not finite.
    """
    config, mesh, first = training.run.config, training.run.mesh, training.run.state.step
    require_updates_left(config, first)
    scale = training.algorithm.optimization.rate_scale
    rates = rates or [config.optimizer.learning_rate * factor for factor in FACTORS]
    trajectories, gap = [], None
    for number in range(num_rounds):
        say(f"round {number + 1} of {num_rounds}: sampling and scoring")
        round = training.rounds.next()
        parts = (training.policy, training.reward, round, training.algorithm, mesh, training.run.timer)
        trajectories.append(collect(*parts))
        if number == 0 and training.algorithm.needs == "transitions":
            gap = -gain_over(*parts[:3], trajectories[0], training.algorithm, mesh, without_noise=True)
    say(f"gradients of {num_rounds} rounds")
    gradients, agreement, steps = measure_gradients(training.algorithm, trajectories, config)
    trials = _Trials(training, prompts, 1 + 4 * len(rates), say)
    base = trials.held_out()
    rewards = {rate: trials.along(gradients, walk(config, rate, first, scale)[1]) for rate in rates}
    groups = find_groups([trajectory.scores.total for trajectory in trajectories], config.grpo.num_generations)
    known = (base, rewards, groups.best, first, num_rounds / 2, scale)
    return Forecast(
        updates=config.run.max_steps - first,
        videos=len(trajectories[0].scores.total) / training.algorithm.updates_per_round,
        base_std=(float(np.nanstd(base, ddof=1)) if np.isfinite(base).sum() > 1 else 0.0) or math.nan,
        groups=groups,
        gradient=agreement,
        steps=steps,
        noise=noise_left(config.rollout) if gap is not None else None,
        ode_gap=gap,
        outlooks=[outlook_of(config, rate, *known) for rate in rates],
        held_out={"base": base.tolist(), **{f"{rate:g}": tried.tolist() for rate, tried in rewards.items()}},
    )


def require_updates_left(config: Config, made: int) -> None:
    """Refuse to forecast a run that is finished.

    Raises:
        ValueError: it has made all its updates.
    """
    if made >= config.run.max_steps:
        raise ValueError(
            f"the run has made {made} of max_steps {config.run.max_steps} updates: set a larger one to forecast more."
        )


def find_groups(rounds: Sequence[Tensor], num_generations: int) -> Groups:
    """Measure how the rewards of some rounds, `[B]` each with NaN for a failed score, differ within groups."""
    rewards = torch.cat(list(rounds)).double()
    groups = rewards.reshape(-1, num_generations)
    groups = groups[(~groups.isnan()).sum(1) > 1]
    counts = (~groups.isnan()).sum(1)
    means = groups.nanmean(1)
    inside = (groups - means[:, None]).square().nansum(1) / (counts - 1)
    centred = rewards[~rewards.isnan()] - rewards.nanmean()
    overall = float(centred.square().mean()) or math.nan
    within = float(((groups - means[:, None]).square().nansum(1) / counts).mean())
    best = float((groups.nan_to_num(-math.inf).max(1).values - means).mean())
    dead = float(groups_without_spread(rewards, num_generations).double().mean())
    return Groups(float(inside.sqrt().mean()), within / overall, dead, best)


def measure_gradients(
    algorithm: Algorithm, trajectories: Sequence[Trajectory], config: Config
) -> tuple[list[Gradient], Agreement, dict[int, Agreement]]:
    """Add up the gradients of some rounds, alternately to one half and the other, and see how far the halves agree.

    Returns:
        The gradients of the halves, their agreement, and that of each denoising step: for GRPO alone, and only if every
        rank trains equally many videos at each step, because all ranks make each pass together.
    """
    num_videos, own = len(trajectories[0].scores.total) * len(trajectories) / 2, algorithm.optimization
    algorithm.optimization = collector = GradientCollector(own, config)
    totals: list[Gradient] = [{}, {}]
    steps: dict[int, Agreement] | None = None
    try:
        if isinstance(algorithm, GRPO):
            with _without_anchor(algorithm):
                steps = _add_by_step(algorithm, trajectories, config, totals)
        if steps is None:
            facts, groups = algorithm.facts(), algorithm.tensors()
            kept = {group: {name: value.clone() for name, value in named.items()} for group, named in groups.items()}
            for number, trajectory in enumerate(trajectories):
                for _ in algorithm.updates(trajectory):
                    pass
                add(totals[number % 2], collector.pop())
                algorithm.load_state(kept, facts)  # such as NFT's old policy, which would follow after each round
    finally:
        algorithm.optimization = own
    return totals, Agreement.of(sign_products(totals), num_videos), steps or {}


@contextmanager
def _without_anchor(algorithm: GRPO) -> Iterator[None]:
    """Leave the anchor's pass out: gradients by step have no KL term, and only some ranks' pairs would need it."""
    anchor, algorithm.anchor = algorithm.anchor, None
    try:
        yield
    finally:
        algorithm.anchor = anchor


def _add_by_step(
    algorithm: GRPO, trajectories: Sequence[Trajectory], config: Config, totals: Sequence[Gradient]
) -> dict[int, Agreement] | None:
    """Add the gradients of each denoising step to the totals of their halves; return how far the halves agree at each.

    None, and nothing is added, where ranks train different numbers of videos at a step.
    """
    collector, num_videos = algorithm.optimization, len(trajectories[0].scores.total) * len(trajectories) / 2
    compared = [algorithm.compare(trajectory) for trajectory in trajectories]
    trained = [Pairs(*map(torch.cat, zip(*one.updates, strict=True))) for one in compared]
    counts = [torch.bincount(pairs.step_index, minlength=config.rollout.grpo_sampling_steps) for pairs in trained]
    if len({tuple(map(tuple, one)) for one in gather([count.tolist() for count in counts])}) > 1:
        return None
    steps: dict[int, Agreement] = {}
    for step in range(config.rollout.grpo_sampling_steps):
        gradients: list[Gradient] = [{}, {}]
        for number, (one, pairs, count) in enumerate(zip(compared, trained, counts, strict=True)):
            if count[step]:
                chosen = pairs.step_index == step
                here = Pairs(pairs.sample_index[chosen], pairs.step_index[chosen])
                algorithm.update(one, here, 0.0, on_policy=True)
            add(gradients[number % 2], collector.pop(float(count[step] / count.sum())))
        if all(gradients):
            share = sum(int(count[step]) for count in counts) / sum(map(len, trajectories))
            steps[step] = Agreement.of(sign_products(gradients), share * num_videos)
        for total, gradient in zip(totals, gradients, strict=True):
            add(total, gradient)
    return steps


def add(total: Gradient, gradient: Gradient) -> None:
    """Add a gradient to a total that may lack some of its parameters, in place."""
    for name, value in gradient.items():
        total[name] = total[name].add_(value) if name in total else value


def sign_products(gradients: Sequence[Gradient]) -> Tensor:
    """Return the inner products of the signs of gradients, over all parameters and ranks, a matrix in float64."""
    products = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for i, one in enumerate(gradients):
        for j, other in enumerate(gradients[: i + 1]):
            shared = [(one[name].sign() * other[name].sign()).sum(dtype=torch.float64) for name in one if name in other]
            of_shards = [product for product in shared if isinstance(product, DTensor)]
            total = float(sum(product for product in shared if not isinstance(product, DTensor)))
            if of_shards:
                device = of_shards[0].device_mesh.device_type  # shards may rest in host memory
                total += float(whole(sum(of_shards).to(device)))
            products[i, j] = products[j, i] = total
    return products


class _Trials:
    """Steps away from the policy and back, with the held-out rewards at each place."""

    def __init__(self, training: Training, prompts: Sequence[Prompt], count: int, say: Callable[[str], None]) -> None:
        self._training, self._prompts, self._count, self._say = training, prompts, count, say
        offload = training.run.config.kl.reference_mode_offload
        self._scratch: Anchor = copy_policy(training.policy.transformer, offload=offload)
        self._done = 0

    def held_out(self) -> np.ndarray:
        """Return the rewards `[N]` of the held-out prompts by the weights as they are."""
        self._done += 1
        self._say(f"held-out videos, {self._done} of {self._count}")
        return self._training.run.validation.sample(self._prompts).scores.total.double().numpy()

    def along(self, gradients: Sequence[Gradient], length: float) -> np.ndarray:
        """Return the rewards `[R, 2, N]` after a step up, and one down, along each of R gradients."""
        return np.array([[self._step(gradient, sign * length) for sign in (1, -1)] for gradient in gradients])

    def _step(self, gradient: Gradient, length: float) -> np.ndarray:
        """Make the optimizer's first step along a gradient with `length` as its rate, look, and step back."""
        optimization, config = self._training.algorithm.optimization, self._training.run.config.optimizer
        with self._scratch.in_place_of_policy():
            for name, parameter in optimization.parameters.items():
                parameter.grad = gradient[name] * math.copysign(1, length) if name in gradient else None
            how = replace(config, learning_rate=abs(length), weight_decay=0.0)
            for optimizer in build_optimizers(optimization.parameters, how):
                optimizer.step()
                optimizer.zero_grad()
            rewards = self.held_out()
        self._scratch.refresh()
        return rewards
