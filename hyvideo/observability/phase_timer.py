"""Where a step's seconds go: rollout, reward, anchor, update."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

PHASES = ("rollout", "reward", "anchor", "update")
BETWEEN = "between phases (validation, saving, logging)"


class PhaseTimer:
    """Adds up wall-clock seconds per phase; on a GPU it waits for the device, so a phase pays for its own kernels.

    `phase` names what is going on (`BETWEEN` outside all blocks), `since` when that began (`time.monotonic`): what a
    watchdog or an error message asks for. `around` makes a context for each phase, which a profiler replaces.

    Example:
        >>> timer = PhaseTimer(device)
        >>> with timer("rollout"):
        ...     videos = rollout(prompts)
        >>> timer.pop()  # {"time/rollout": 1.93, "time/reward": 0.0, "time/anchor": 0.0, "time/update": 0.0}
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.around: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.phase = BETWEEN
        self.since = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the duration of the `with` block to `phase`; where it fails, `self.phase` goes on naming it.

        Raises:
            ValueError: `phase` is not one of PHASES.
        """
        if phase not in self._seconds:
            raise ValueError(f"Unknown phase {phase!r}: expected one of {', '.join(PHASES)}.")
        self._enter(phase)
        start = clock(self.device)
        with self.around(phase):
            try:
                yield
            finally:
                self._seconds[phase] += clock(self.device) - start
        self._enter(BETWEEN)

    def pop(self) -> dict[str, float]:
        """Seconds per phase since the last pop, as `{"time/<phase>": seconds}` for every phase; starts again at 0."""
        seconds = {f"time/{phase}": value for phase, value in self._seconds.items()}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return seconds

    def _enter(self, phase: str) -> None:
        self.phase, self.since = phase, time.monotonic()


def clock(device: torch.device) -> float:
    """Return the seconds of a clock when `device` has finished what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
