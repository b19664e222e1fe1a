"""Watch a run: is its replay exact, may its reward be exploited, does a judge fall, and do videos become alike?"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from pydantic_core import to_jsonable_python
from scipy.stats import t as student

from hyvideo.config.schema import Config
from hyvideo.evaluation.drift import Drift

Action = Literal["warn", "stop", "rollback"]

ALPHA = 0.05
"""Largest probability of a false alarm in a whole run."""

ROLLBACK_RATE = 0.3
"""What the learning rate is multiplied by after a rollback."""


@dataclass(frozen=True)
class Look:
    """One validation of the same videos: N scores each by the trained reward and by the judge; NaN where one failed.

    Attributes:
        step: updates made before it.
        key: what the scores depend on besides the policy; only looks of one key are compared.
    """

    step: int
    key: str
    reward: Sequence[float]
    judge: Sequence[float]

    @property
    def mean(self) -> float:
        """The judge's mean, failed scores left out; NaN if all failed."""
        valid = [score for score in self.judge if math.isfinite(score)]
        return sum(valid) / len(valid) if valid else math.nan


@dataclass(frozen=True)
class Alarm:
    """The trained reward rises while the judge falls.

    Attributes:
        best: step of the best look by the judge, with which the newest was compared.
        action: what to do about it.
        message: the numbers, in words.
    """

    best: int
    action: Action
    message: str


@dataclass
class RewardGuard:
    """Watches a run's validations; every rank has one, with the same looks.

    **The test.** At look k the newest scores are compared with those of the best earlier look by the judge, as paired
    differences over the videos. The guard alarms if the reward's mean difference is positive and a one-sided t-test
    rejects that the judge's is at least 0, at the level ``ALPHA * 6 / (pi^2 k^2) / (k - 1)``. The sum over the k - 1
    looks that could have been the best, and over all k, is at most `ALPHA` (union bound). So a run whose judge does not
    fall is stopped with a probability of at most `ALPHA`, however often it is looked at and however the looks depend on
    each other: alpha-spending (Lan and DeMets 1983) with a summable series, for an unknown number of looks.

    Attributes:
        action: of the first alarm; after a rollback the next alarm stops.
        looks: all so far.
        rolled_back: whether it has been done.
    """

    action: Action
    looks: list[Look] = field(default_factory=list)
    rolled_back: bool = False

    def observe(self, look: Look) -> Alarm | None:
        """Take a validation's scores; return an alarm, or None."""
        earlier = self.best()
        self.looks.append(look)
        if earlier is None or earlier.key != look.key:
            return None
        reward, judge = np.subtract(look.reward, earlier.reward), np.subtract(look.judge, earlier.judge)
        both = np.isfinite(reward) & np.isfinite(judge)
        reward, judge, k = reward[both], judge[both], len(self.looks)
        level = ALPHA * 6 / (math.pi**2 * k**2) / (k - 1)
        p = probability_of_no_fall(judge)
        if not (len(judge) and reward.mean() > 0 and p <= level):
            return None
        action = "stop" if self.action == "rollback" and self.rolled_back else self.action
        return Alarm(
            earlier.step,
            action,
            f"reward_guard: from step {earlier.step} to {look.step} the trained reward rose by {reward.mean():.4f}, "
            f"but the judge fell by {-judge.mean():.4f} over {len(judge)} validation videos (p = {p:.1e}, and "
            f"{level:.1e} is enough at look {k}): the policy exploits flaws of the reward. The best checkpoint by the "
            f"judge is step_{earlier.step}.",
        )

    def best(self) -> Look | None:
        """Return the best look by the judge's mean among those comparable with the newest; the earliest of equals."""
        comparable = [each for each in self.looks if each.key == self.looks[-1].key and math.isfinite(each.mean)]
        return max(comparable, key=lambda each: each.mean, default=None)

    def facts(self) -> dict[str, Any]:
        """Return the state, as JSON can write it: null for a failed score."""
        return {"looks": to_jsonable_python(self.looks, inf_nan_mode="null"), "rolled_back": self.rolled_back}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Restore what `facts` returned."""
        self.rolled_back = bool(facts["rolled_back"])
        self.looks = [
            Look(int(look["step"]), look["key"], _nans(look["reward"]), _nans(look["judge"])) for look in facts["looks"]
        ]


def fallen_spreads(drifted: Drift, shares: Mapping[str, float]) -> str:
    """Say which spreads over the prompts clearly fell, and below their shares (`drift_guard`); empty if none did."""
    spreads = {look: drifted.changes[look].spread for look in shares}
    fallen = " and ".join(
        f"{1 + spread.mean:.2f} for {look} (at least {shares[look]:g} is asked for)"
        for look, spread in spreads.items()
        if spread.high < 0 and 1 + spread.mean < shares[look]
    )
    return fallen and (
        f"drift_guard: videos become alike. Compared with before training, their spread over {drifted.num_prompts} "
        f"prompts fell to {fallen}."
    )


def probability_of_no_fall(differences: np.ndarray) -> float:
    """Return the one-sided p of a t-test of paired differences `[N]` against a mean of at least 0; 1 for N below 2."""
    if len(differences) < 2:
        return 1.0
    mean, error = differences.mean(), differences.std(ddof=1) / math.sqrt(len(differences))
    if error == 0:
        return float(mean >= 0)
    return float(student.cdf(mean / error, len(differences) - 1))


def _nans(scores: Sequence[float | None]) -> list[float]:
    return [math.nan if score is None else float(score) for score in scores]


HALF = 20
"""Rounds whose mean is compared with that of as many before them."""

LEAST_FALL = 0.2
"""Share of the diversity that may be lost before it counts as falling; the noise of a few rounds stays below."""


class RewardWatch:
    """Compares the halves of the last 2 `HALF` rounds; after a warning it starts afresh.

    The reward has risen when the means of the halves differ by more than two standard errors. Validation is measured
    every few rounds on fixed noise. It has fallen when the newest value lies more than the reward's standard error
    below the last one from before these rounds, or below their first if there was none. Diversity has fallen when a
    fifth of it is gone.

    Example:
        >>> warning = watch.observe({"reward/mean": 0.9, "rollout/diversity": 0.02})  # None, or a message
    """

    def __init__(self) -> None:
        self._rows: deque[Mapping[str, float]] = deque()
        self._earlier: list[float] = []

    def observe(self, row: Mapping[str, float]) -> str | None:
        """Take `reward/mean`, `rollout/diversity` and, if there is one, `valid/reward`; return a warning, or None."""
        self._rows.append(row)
        if len(self._rows) > 2 * HALF:
            self._earlier = _validations([self._rows.popleft()]) or self._earlier
        if len(self._rows) < 2 * HALF:
            return None
        before, after, error = self._halves("reward/mean")
        if not after - before > 2 * error:
            return None
        rise = f"reward/mean rose from {before:+.4f} to {after:+.4f} over {2 * HALF} rounds"
        falls, inside = [], _validations(self._rows)
        if inside and (first := [*self._earlier, *inside][0]) - inside[-1] > error:
            falls.append(f"valid/reward fell from {first:+.4f} to {inside[-1]:+.4f}")
        before, after, _ = self._halves("rollout/diversity")
        if after < (1 - LEAST_FALL) * before:
            falls.append(f"rollout/diversity fell from {before:.4f} to {after:.4f}")
        if not falls:
            return None
        self._rows.clear()
        self._earlier = []
        return (
            f"{rise}, but {' and '.join(falls)}: the policy may be exploiting flaws of the reward. Look at the newest "
            "videos in samples/; a larger kl_weight, other reward_weights or an earlier checkpoint may help."
        )

    def _halves(self, name: str) -> tuple[float, float, float]:
        """Return the means of both halves of a metric and the standard error of their difference."""
        values = [row.get(name, math.nan) for row in self._rows]
        before, after = np.array(values).reshape(2, -1)
        return float(before.mean()), float(after.mean()), math.sqrt((before.var() + after.var()) / HALF)


def _validations(rows: Iterable[Mapping[str, float]]) -> list[float]:
    return [row["valid/reward"] for row in rows if math.isfinite(row.get("valid/reward", math.nan))]


class ReplayWatch:
    """Compares `ratio/max_deviation`, measured before the first update of each round, with `clip_range`.

    A ratio that leaves the clip range although no weight was changed is an error of the replay, not a step of the
    policy. The first update of a round does not depend on it, since its ratios are 1 by definition. In the later ones
    the clip would silence videos for this error alone.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._told = False

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Take the metrics of an update; return a warning the first time that the replay differs too much."""
        deviation, grpo = metrics.get("ratio/max_deviation", 0.0), self._config.grpo
        if self._told or deviation <= grpo.clip_range:
            return None
        self._told = True
        videos, update = grpo.batch_size * grpo.gradient_accumulation_steps, grpo.mini_batch_size_per_update
        rollout = min(self._config.rollout.rollout_micro_batch_size or videos, videos)
        cause = (
            f"In {self._config.model.dtype} the likely cause is that the rollout computes {rollout} videos together "
            f"and the update {update}."
        )
        if rollout == update:
            cause = (
                "The settings do not explain it, so the attention kernel may choose another plan with gradients than "
                "without (python -m benchmarks.attention shows it on your GPU), or an algorithm or reward of your own "
                "changes weights between rollout and update."
            )
        return (
            f"ratio/max_deviation is {deviation:.1e} although no weight was changed since the rollout, more than "
            f"clip_range {grpo.clip_range:g}: replaying a denoising step does not give what the rollout recorded. "
            f"{cause}"
        )
