"""Ask a run to stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hyvideo.distributed.collectives import gather

PREEMPTIONS = ("SIGTERM", "SIGUSR1")
"""Signals by which schedulers announce that the machine will be taken away."""

PREEMPTED = 75
"""Exit status of a run that was preempted, has saved and wants to be started again (EX_TEMPFAIL of sysexits.h)."""


class StopSignal:
    """Remembers the first SIGINT, SIGTERM or SIGUSR1 so that the run can save and end.

    The same signal again acts as it would without this class: it ends the process at once, without saving the round.
    The other one does not: on Ctrl-C torchrun sends its ranks SIGTERM after the SIGINT that the terminal has sent them.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        """Listen inside the `with` block; a signal's former handler comes back after it, and at the block's end."""
        former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

        def remember(number: int, frame: FrameType | None) -> None:
            """Keep the first signal's name; the same one again finds its former handler."""
            self.name = self.name or signal.Signals(number).name
            signal.signal(number, former[number])

        for number in former:
            signal.signal(number, remember)
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def of_all_ranks(self) -> str | None:
        """Return the name of the first signal that any rank has got; all ranks call it, and get the same."""
        return next(filter(None, gather(self.name)), None)

    def preempted(self) -> bool:
        """Whether any rank is being preempted; all ranks call it, and get the same."""
        return self.of_all_ranks() in PREEMPTIONS
