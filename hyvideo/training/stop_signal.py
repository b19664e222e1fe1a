"""Ask a run to stop between rounds."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """Remembers the first SIGINT or SIGTERM so that the run can finish its round, save and end.

    The same signal again acts as it would without this class: it ends the process at once, without saving the round.
    The other one does not: on Ctrl-C torchrun sends its ranks SIGTERM after the SIGINT that the terminal has sent them.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        """Listen inside the `with` block; a signal's former handler comes back after it, and at the block's end."""
        former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

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
