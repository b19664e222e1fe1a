"""A guard against reward hacking: a judge that is not trained on, and a test of when it falls as the reward rises."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.stats import t as student

Action = Literal["warn", "stop", "rollback"]

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
    rejects that the judge's is at least 0, at the level ``alpha * 6 / (pi^2 k^2) / (k - 1)``. The sum over the k - 1
    looks that could have been the best, and over all k, is at most alpha (union bound). So a run whose judge does not
    fall is stopped with a probability of at most `alpha`, however often it is looked at and however the looks depend on
    each other: alpha-spending (Lan and DeMets 1983) with a summable series, for an unknown number of looks.

    Attributes:
        action: of the first alarm; after a rollback the next alarm stops.
        alpha: largest probability of a false alarm in a whole run.
        looks: all so far.
        rolled_back: whether it has been done.
    """

    action: Action
    alpha: float
    looks: list[Look] = field(default_factory=list)
    rolled_back: bool = False

    def observe(self, look: Look) -> Alarm | None:
        """Take a validation's scores; return an alarm, or None."""
        earlier = self.best()
        self.looks.append(look)
        if earlier is None or earlier.key != look.key:
            return None
        reward, judge = (
            np.subtract(now, then) for now, then in ((look.reward, earlier.reward), (look.judge, earlier.judge))
        )
        both = np.isfinite(reward) & np.isfinite(judge)
        reward, judge, k = reward[both], judge[both], len(self.looks)
        level = self.alpha * 6 / (math.pi**2 * k**2) / (k - 1)
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
        looks = [
            {"step": look.step, "key": look.key, "reward": _nulls(look.reward), "judge": _nulls(look.judge)}
            for look in self.looks
        ]
        return {"looks": looks, "rolled_back": self.rolled_back}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Restore what `facts` returned; a ValueError where something is missing."""
        try:
            self.rolled_back = bool(facts["rolled_back"])
            self.looks = [
                Look(int(look["step"]), look["key"], _nans(look["reward"]), _nans(look["judge"]))
                for look in facts["looks"]
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the checkpoint's reward_guard cannot be read: {error!r}") from error


def probability_of_no_fall(differences: np.ndarray) -> float:
    """Return the one-sided p of a t-test of paired differences `[N]` against a mean of at least 0; 1 for N below 2."""
    if len(differences) < 2:
        return 1.0
    mean, error = differences.mean(), differences.std(ddof=1) / math.sqrt(len(differences))
    if error == 0:
        return float(mean >= 0)
    return float(student.cdf(mean / error, len(differences) - 1))


def _nulls(scores: Sequence[float]) -> list[float | None]:
    return [score if math.isfinite(score) else None for score in scores]


def _nans(scores: Sequence[float | None]) -> list[float]:
    return [math.nan if score is None else float(score) for score in scores]
