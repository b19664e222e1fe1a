"""Schedule of the KL coefficient lambda (paper A.6, Fig. 7): warm up, then follow the observed KL."""

import math
from collections import deque
from typing import Any, Literal, get_args

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
        min_coef: Floor of lambda, >= 0.
        start_coef: Start of the warm-up, between floor and ceiling; None means min_coef.
        warmup_updates: Length of the warm-up in updates, >= 0; 0 starts at the ceiling.
        target: Desired KL, > 0; None means max_coef, as in the reference.
        schedule: ``two_stage``, ``fixed`` or ``milder``.
        published: As the release: the warm-up rises from min_coef whatever start_coef is, and its last update follows
            the observed KL already, so that lambda reaches ``1 - 1 / warmup_updates`` of its ceiling before.

    Raises:
        ValueError: If a value is out of range or the floor lies above the ceiling.

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
        if schedule not in get_args(Schedule):
            raise ValueError(f"kl_schedule must be one of {', '.join(get_args(Schedule))}, got {schedule!r}")
        if not (math.isfinite(max_coef) and max_coef > 0):
            raise ValueError(
                f"max_coef (kl_weight) must be positive, got {max_coef}; without a KL term, build no controller"
            )
        ceiling = MILDER_CEILING * max_coef if schedule == "milder" else max_coef
        if schedule != "fixed" and not 0 <= min_coef <= ceiling:
            raise ValueError(
                f"kl_min_coef must lie within [0, {ceiling:g}], up to lambda's ceiling for {schedule!r}, got {min_coef}"
            )
        start_coef = min_coef if start_coef is None else start_coef
        if schedule != "fixed" and not min_coef <= start_coef <= ceiling:
            raise ValueError(
                f"kl_coef must lie within [{min_coef}, {ceiling:g}] for {schedule!r}, from kl_min_coef to "
                f"the ceiling, got {start_coef}"
            )
        if warmup_updates < 0:
            raise ValueError(f"kl_warmup_updates must be at least 0, got {warmup_updates}")
        target = max_coef if target is None else target
        if not (math.isfinite(target) and target > 0):
            raise ValueError(f"target (kl_target) must be positive, got {target}")
        self.schedule = schedule
        self.min_coef, self.start_coef, self.ceiling, self.target = min_coef, start_coef, ceiling, target
        self.warmup_updates = 0 if schedule == "fixed" else warmup_updates
        self._published = published
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._num_updates = 0
        self._coefficient = start_coef if self.warmup_updates else ceiling

    @property
    def coefficient(self) -> float:
        """Lambda to use for the next loss."""
        return self._coefficient

    def update(self, kl: float) -> float:
        """Take the KL observed in the update just made and return the coefficient for the next one.

        Args:
            kl: Mean KL over the whole batch, the same number on every rank; may be negative, as estimates are.

        Raises:
            ValueError: If kl is not finite; the controller is then left unchanged.
        """
        kl = float(kl)
        if not math.isfinite(kl):
            raise ValueError(f"the KL of update {self._num_updates + 1} is {kl}: the policy or its anchor has diverged")
        self._num_updates += 1
        self._recent.append(kl)
        if self._num_updates <= self.warmup_updates - self._published:
            start = self.min_coef if self._published else self.start_coef
            self._coefficient = start + self._num_updates / self.warmup_updates * (self.ceiling - start)
        elif self.schedule != "fixed" and not (self._published and len(self._recent) < WINDOW):
            recent = sum(self._recent) / len(self._recent)
            if recent > 1.5 * self.target:
                self._coefficient *= 0.9
            elif recent < 0.5 * self.target:
                self._coefficient *= 1.1
            self._coefficient = min(max(self._coefficient, self.min_coef), self.ceiling)
        return self._coefficient

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides later coefficients, besides the constructor's arguments."""
        return {"num_updates": self._num_updates, "coefficient": self._coefficient, "recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the `state_dict` was taken.

        Raises:
            ValueError: If the state has other keys than `state_dict` writes.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"KL controller state must have the keys {sorted(self.state_dict())}, got {sorted(state)}")
        self._num_updates = int(state["num_updates"])
        floor = self.ceiling if self.schedule == "fixed" else self.min_coef  # a resume may change the schedule
        self._coefficient = min(max(float(state["coefficient"]), floor), self.ceiling)
        self._recent.clear()
        self._recent.extend(float(value) for value in state["recent"])
