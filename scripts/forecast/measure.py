"""Forecast what a training will gain, from a few rounds without an update and trial steps along their gradients.

The model has three parts. What training can gain at most is what the best video of a group has more than the group's
mean. How fast it comes there is what a short step along some rounds' gradient gains on held-out prompts. What it costs
is what a random walk loses, since most of each update is noise; learning pulls this walk back.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyvideo.algorithms.algorithm import Algorithm, Trajectory
from hyvideo.algorithms.optimizer import NonFiniteUpdateError, Optimization, Step, build_optimizers, set_learning_rate
from hyvideo.algorithms.weights_copy import copy_policy
from hyvideo.config.schema import Config
from hyvideo.data.prompts import Prompt
from hyvideo.distributed.collectives import average_gradients, whole
from hyvideo.evaluation.intervals import Interval
from hyvideo.grpo.advantages import groups_without_spread
from hyvideo.training.checks import is_usual_noise, noise_left
from hyvideo.training.collect import collect, gain_over
from hyvideo.training.run import Run

Gradient = dict[str, Tensor]
"""Gradient of every trained parameter by name, sharded as the parameter is."""

FACTORS = (1 / 3, 1.0, 3.0)
"""Learning rates that are tried unless others are given, as multiples of the configured one."""

ADAM_OVER_SIGN = math.sqrt(math.pi / 2)
"""How far Adam's later steps follow a weak signal in normal noise, as a multiple of its first step, which is a sign."""


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
    """How far the gradients of independent halves agree.

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
class Outlook:
    """What a run at one learning rate is expected to gain on held-out prompts, in the reward's unit.

    Attributes:
        rate: learning rate.
        length: of each weight's random walk over the run, ``sqrt(sum of squared rates)``, which the trial steps have.
        taught: what the direction of a trial step gains: half the difference between a step up and one down.
        spoilt: what the size of a trial step loses: the mean loss of the two.
        gain: of the whole run.
    """

    rate: float
    length: float
    taught: Interval
    spoilt: Interval
    gain: Interval


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run.

    Attributes:
        updates: number left in the run, over which the gains are expected.
        videos: number in the gradient of one update.
        base_std: standard deviation of the held-out rewards before training; NaN where they are all equal.
        groups: how rewards differ within groups.
        gradient: agreement of the halves.
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
        reached = {name: p.grad.detach().clone() for name, p in self.parameters.items() if p.grad is not None}
        self._zero_grad()
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise NonFiniteUpdateError(
                f"the gradient of a forecast's round must be finite; received loss {loss} and gradient norm {norm}. "
                "Look for what is not finite, such as a damaged checkpoint or a reward far too large."
            )
        for name, gradient in reached.items():
            self.collected[name] = self.collected[name].add_(gradient) if name in self.collected else gradient
        return Step(math.nan, 0.0, skipped=True)


def forecast(
    training: Run,
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
    config, first = training.config, training.state.step
    require_updates_left(config, first)
    scale = training.algorithm.optimization.rate_scale
    rates = rates or [config.optimizer.learning_rate * factor for factor in FACTORS]
    trajectories, gap = [], None
    for number in range(num_rounds):
        say(f"round {number + 1} of {num_rounds}: sampling and scoring")
        parts = (training.policy, training.algorithm, training.reward, training.rounds.next())
        trajectories.append(collect(*parts))
        if number == 0 and training.algorithm.needs == "transitions":
            gap = -gain_over(*parts, trajectories[0], without_noise=True)
    say(f"gradients of {num_rounds} rounds")
    gradients, agreement = measure_gradients(training.algorithm, trajectories, config)
    base, rewards = _held_out_rewards(
        training, prompts, gradients, {rate: walk(config, rate, first, scale)[1] for rate in rates}, say
    )
    groups = find_groups([trajectory.scores.total for trajectory in trajectories], config.grpo.num_generations)
    known = (base, rewards, groups.best, first, num_rounds / 2, scale)
    return Forecast(
        updates=config.run.max_steps - first,
        videos=len(trajectories[0].scores.total) / training.algorithm.updates_per_round,
        base_std=(float(np.nanstd(base, ddof=1)) if np.isfinite(base).sum() > 1 else 0.0) or math.nan,
        groups=groups,
        gradient=agreement,
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
    squares = (groups - means[:, None]).square().nansum(1)
    centred = rewards[~rewards.isnan()] - rewards.nanmean()
    overall = float(centred.square().mean()) or math.nan
    best = float((groups.nan_to_num(-math.inf).max(1).values - means).mean())
    dead = float(groups_without_spread(rewards, num_generations).double().mean())
    return Groups(float((squares / (counts - 1)).sqrt().mean()), float((squares / counts).mean()) / overall, dead, best)


def measure_gradients(
    algorithm: Algorithm, trajectories: Sequence[Trajectory], config: Config
) -> tuple[list[Gradient], Agreement]:
    """Add up the gradients of some rounds, alternately to one half and the other, and see how far the halves agree.

    Every round is measured with the state that the algorithm has before the first one, such as NFT's old policy.
    """
    own, collectors = algorithm.optimization, [GradientCollector(algorithm.optimization, config) for _ in range(2)]
    facts, groups = algorithm.facts(), algorithm.tensors()
    kept = {group: {name: value.clone() for name, value in named.items()} for group, named in groups.items()}
    try:
        for number, trajectory in enumerate(trajectories):
            algorithm.optimization = collectors[number % 2]
            for _ in algorithm.updates(trajectory):
                pass
            algorithm.load_state(kept, facts)
    finally:
        algorithm.optimization = own
    gradients = [collector.collected for collector in collectors]
    num_videos = len(trajectories[0].scores.total) * len(trajectories) / 2
    return gradients, Agreement.of(sign_products(gradients), num_videos)


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


def _held_out_rewards(
    training: Run,
    prompts: Sequence[Prompt],
    gradients: Sequence[Gradient],
    lengths: Mapping[float, float],
    say: Callable[[str], None],
) -> tuple[np.ndarray, dict[float, np.ndarray]]:
    """Return the rewards `[N]` of the weights as they are, and `[2, 2, N]` after steps up and down for each rate.

    A step is the optimizer's first one along a gradient, with a length as its rate; afterwards the weights are back.
    """
    config, parameters = training.config, training.algorithm.optimization.parameters
    scratch = copy_policy(training.policy.transformer, offload="anchor" in config.parallel.offload)
    numbers, count = itertools.count(1), 1 + 2 * len(gradients) * len(lengths)

    def look() -> np.ndarray:
        """Sample and score the held-out prompts."""
        say(f"held-out videos, {next(numbers)} of {count}")
        return training.validation.sample(prompts).scores.total.double().numpy()

    def step(gradient: Gradient, sign: int, length: float) -> np.ndarray:
        """Look from a step away."""
        with scratch.in_place_of_policy():
            for name, parameter in parameters.items():
                parameter.grad = gradient[name] * sign if name in gradient else None
            how = replace(config.optimizer, learning_rate=length, weight_decay=0.0)
            for optimizer in build_optimizers(parameters, how):
                optimizer.step()
                optimizer.zero_grad()
            rewards = look()
        scratch.refresh()
        return rewards

    base = look()
    return base, {
        rate: np.array([[step(gradient, sign, length) for sign in (1, -1)] for gradient in gradients])
        for rate, length in lengths.items()
    }


def walk(config: Config, rate: float, first: int = 0, scale: float = 1.0) -> tuple[float, float]:
    """Return the sum of a run's learning rates after update `first`, and the root of the sum of their squares.

    `rate` takes the place of the configured one, and is warmed up like it; all are times `scale`, which is below 1
    after a rollback.
    """
    optimizer, updates = replace(config.optimizer, learning_rate=rate), range(first, config.run.max_steps)
    rates = np.array([set_learning_rate([], optimizer, update, scale) for update in updates])
    return float(rates.sum()), float(np.sqrt(np.square(rates).sum()))


def outlook_of(
    config: Config,
    rate: float,
    base: np.ndarray,
    tried: Mapping[float, np.ndarray],
    most: float,
    first: int,
    rounds_per_half: float,
    scale: float = 1.0,
) -> Outlook:
    """Work out what a run at one of the tried rates is expected to gain, with the slope that the smallest one shows.

    `base` are the held-out rewards `[N]` of the policy as it is, with NaN for a failed score, and `tried` those
    `[H, 2, N]` after a step up and one down along the gradients of H halves of `rounds_per_half` rounds each. A run can
    gain `most` at most, has made `first` updates already, and makes the others at `scale` times its rate. Intervals
    resample halves and videos. Every mean is over the videos whose scores it needs are all there, of each half by
    itself; of so few that a resample has none, there is no interval.
    """
    order = sorted(tried)
    taught, slope = ((tried[of][:, 0] - tried[of][:, 1]) / 2 * (rate / of) for of in (rate, order[0]))
    parts = np.array([taught, slope, *(base - tried[of].mean(1) for of in order)])
    parts = parts[..., np.isfinite(parts).any((0, 1))]
    rng, own = np.random.default_rng(0), order.index(rate)
    halves, videos = (rng.integers(0, count, (2000, count)) for count in parts.shape[1:])
    drawn = _means(parts[:, halves[:, :, None], videos[:, None]])
    travelled, length = walk(config, rate, first, scale)
    follows = ADAM_OVER_SIGN * travelled / length / math.sqrt(config.grpo.updates_per_rollout * rounds_per_half)
    spans = list(itertools.pairwise([0.0, *((of / rate) ** 2 for of in order)]))

    def told(means: np.ndarray) -> np.ndarray:
        """Return what is taught and spoilt, and the gain, `[3]` or `[3, D]`, by means `[2 + R]` or D times as many."""
        taught, slope, *spoilt = means
        losses = np.diff([np.zeros_like(slope), *spoilt], axis=0)
        losses[own + 1 :] = np.nan_to_num(losses[own + 1 :])  # the walk does not come to what longer steps lose

        def lost(square: np.ndarray) -> np.ndarray:
            """What a walk loses lies between what the steps around its length lose."""
            return sum(loss * np.clip((square - a) / (b - a), 0, 1) for loss, (a, b) in zip(losses, spans, strict=True))

        return np.array([taught, spoilt[own], expected_gain(follows * slope, lost, most)])

    ends = np.percentile(told(drawn), (2.5, 97.5), axis=1).T.tolist()
    counts = np.isfinite(parts).sum((1, 2)) // len(parts[0])
    counted = [counts[0], counts[2 + own], counts[: 3 + own].min()]
    means = zip(told(_means(parts)), ends, counted, strict=True)
    return Outlook(rate, length, *(Interval(float(mean), *both, int(count)) for mean, both, count in means))


def _means(values: np.ndarray) -> np.ndarray:
    """Return the means over the last two dims of what is finite; NaN of nothing."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(finite, values, 0.0).sum((-2, -1)) / finite.sum((-2, -1))


def expected_gain(signal: np.ndarray, spoilt: Callable[[np.ndarray], np.ndarray], most: float) -> np.ndarray:
    """Return ``most (1 - exp(-n)) - spoilt(x)`` with ``n = signal / most`` and ``x' = 1 - n x (1 + spoilt(x) / most)``.

    `signal` is what the run would gain if it learnt as fast as in its first update all the time. Learning slows down as
    there is less to be found. A walk of squared length x, as a share of the whole walk's, loses `spoilt`. Learning
    pulls it back, the more so the more there is to be found again. A signal below 0 only loses. Signals may have any
    shape, and `spoilt` gets and returns arrays of the same.
    """
    most, step = max(most, 1e-12), 1 / 200
    n, square = np.maximum(signal / most, 0.0), np.zeros_like(signal)
    for _ in range(200):  # backward Euler, because n may be large
        square = (square + step) / (1 + step * n * (1 + np.maximum(spoilt(square), 0.0) / most))
    return np.minimum(signal, 0.0) - most * np.expm1(-n) - spoilt(square)
