"""Schedule of the KL coefficient lambda (paper A.6, Fig. 7): warm up, then follow the observed KL."""

import math
from collections import deque
from typing import Any, Literal

Schedule = Literal["two_stage", "fixed", "milder"]

MILDER_CEILING = 0.1
"""Ceiling of ``milder`` as a share of max_coef. The paper gives no number; at its defaults (1e-7 to 1e-5) this is the
geometric mean."""

WINDOW = 10
"""Number of observed KL values that are averaged."""


class KLController:
    """Gives the coefficient of the KL term, one update of the optimizer at a time.

    ``two_stage``: a linear warm-up from ``start_coef`` to the ceiling over ``warmup_updates``, then, with the mean of
    the last ``WINDOW`` observed KL values (those of the warm-up included): above ``1.5 target`` the coefficient is
    multiplied by 0.9, below ``0.5 target`` by 1.1, always within [min_coef, ceiling]. So lambda *relaxes* when the
    policy has moved far and tightens when it hardly moves; this sign is the paper's. ``milder`` is the same under a
    ceiling of ``MILDER_CEILING * max_coef``; ``fixed`` is ``max_coef`` throughout.

    Args:
        max_coef: Ceiling of lambda (``kl_weight``), > 0; with ``kl_weight=0`` there is no KL term and no controller.
        min_coef: Floor of lambda, >= 0; at most the ceiling, as in the reference, so that a smaller ``kl_weight`` alone
            makes a weaker penalty.
        start_coef: Start of the warm-up, brought between floor and ceiling; None means min_coef.
        warmup_updates: Length of the warm-up in updates, >= 0; 0 starts at the ceiling.
        target: Desired KL, > 0; None means max_coef, as in the reference.
        schedule: ``two_stage``, ``fixed`` or ``milder``.
        published: As the release: the warm-up rises from min_coef whatever start_coef is, and its last update follows
            the observed KL already, so that lambda reaches ``1 - 1 / warmup_updates`` of its ceiling before.

    Example:
        >>> controller = KLController(max_coef=1e-5, min_coef=0.0, warmup_updates=2)
        >>> controller.coefficient, controller.update(0.3), controller.update(0.3), controller.update(0.3)
        (0.0, 5e-06, 1e-05, 9e-06)
    """

    def __init__(
        self,
        *,
        max_coef: float = 1e-5,
        min_coef: float = 1e-7,
        start_coef: float | None = None,
        warmup_updates: int = 100,
        target: float | None = None,
        schedule: Schedule = "two_stage",
        published: bool = False,
    ) -> None:
        self.schedule, self.target = schedule, max_coef if target is None else target
        self.ceiling = MILDER_CEILING * max_coef if schedule == "milder" else max_coef
        self.min_coef = min(min_coef, self.ceiling)
        start_coef = self.min_coef if start_coef is None else start_coef
        self.start_coef = min(max(start_coef, self.min_coef), self.ceiling)
        self.warmup_updates = 0 if schedule == "fixed" else warmup_updates
        self._published = published
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._num_updates = 0
        self.coefficient = self.start_coef if self.warmup_updates else self.ceiling
        """Lambda to use for the next loss."""

    def update(self, kl: float) -> float:
        """Take the KL observed in the update just made and return the coefficient for the next one.

        `kl` is the mean over the whole batch, the same number on every rank, and may be negative, as estimates are. One
        that is not finite is a ValueError, and leaves the controller unchanged.
        """
        kl = float(kl)
        if not math.isfinite(kl):
            raise ValueError(f"the KL of update {self._num_updates + 1} is {kl}: the policy or its anchor has diverged")
        self._num_updates += 1
        self._recent.append(kl)
        if self._num_updates <= self.warmup_updates - self._published:
            start = self.min_coef if self._published else self.start_coef
            self.coefficient = start + self._num_updates / self.warmup_updates * (self.ceiling - start)
        elif self.schedule != "fixed" and not (self._published and len(self._recent) < WINDOW):
            recent = sum(self._recent) / len(self._recent)
            if recent > 1.5 * self.target:
                self.coefficient *= 0.9
            elif recent < 0.5 * self.target:
                self.coefficient *= 1.1
            self.coefficient = min(max(self.coefficient, self.min_coef), self.ceiling)
        return self.coefficient

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides later coefficients, besides the constructor's arguments."""
        return {"num_updates": self._num_updates, "coefficient": self.coefficient, "recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the `state_dict` was taken."""
        self._num_updates = int(state["num_updates"])
        floor = self.ceiling if self.schedule == "fixed" else self.min_coef  # a resume may change the schedule
        self.coefficient = min(max(float(state["coefficient"]), floor), self.ceiling)
        self._recent.clear()
        self._recent.extend(float(value) for value in state["recent"])
