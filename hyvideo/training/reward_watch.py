"""Warns when the reward may be hacked: it rises while validation or the diversity of a prompt's videos falls."""

import math
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

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
