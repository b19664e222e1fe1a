"""Signals that ask a run to save and stop."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PREEMPTIONS = ("SIGTERM", "SIGUSR1", "SIGHUP")
"""Signals by which schedulers announce that the machine will be taken away, or the terminal is gone."""

REPEAT_SECONDS = 5.0
"""A preemption repeated within this time is the same one: sent to all processes of a job, and passed on by torchrun."""

PREEMPTED = 75
"""Exit status of a run that was preempted, has saved and wants to be started again (EX_TEMPFAIL of sysexits.h)."""

LOST = 69
"""Exit status of a rank that lost its connection to others or its device, where another start may help
(EX_UNAVAILABLE)."""


def listened_preemptions() -> list[signal.Signals]:
    """The preemption signals that this process does not ignore (under nohup it ignores SIGHUP)."""
    numbers = [signal.Signals[name] for name in PREEMPTIONS]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


class StopSignal:
    """Remembers the first SIGINT or preemption so that the run can save and end.

    The same signal again ends the process at once, without saving the round; a preemption does so only if it comes
    more than `REPEAT_SECONDS` after the first. Another signal does not: on Ctrl-C torchrun sends its ranks SIGTERM
    after the SIGINT that the terminal has sent them.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        """Listen inside the `with` block, and put the former handlers back at its end."""
        former = {number: signal.getsignal(number) for number in (signal.SIGINT, *listened_preemptions())}
        received: dict[int, float] = {}

        def remember(number: int, frame: FrameType | None) -> None:
            self.name = self.name or signal.Signals(number).name
            now = time.monotonic()
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
            elif now - received.setdefault(number, now) > REPEAT_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        for number in former:
            signal.signal(number, remember)
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def of_all_ranks(self) -> str | None:
        """Return the name of the first signal that any rank received; all ranks call it, and get the same."""
        from hyvideo.distributed.collectives import gather  # here, so that a command line is read before PyTorch

        return next(filter(None, gather(self.name)), None)

    def preempted(self) -> bool:
        """Whether any rank is being preempted; all ranks call it, and get the same."""
        return self.of_all_ranks() in PREEMPTIONS
