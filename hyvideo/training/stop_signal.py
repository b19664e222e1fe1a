"""Ask a run to stop between rounds."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """Remembers the first SIGINT or SIGTERM so that the run can finish its round, save and end.

    A second signal acts as it would without this class: it ends the process at once, without saving the round.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        """Listen inside the `with` block; the former handlers come back after the first signal and at its end."""
        former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in former.items():
                signal.signal(number, handler)

        def remember(number: int, frame: FrameType | None) -> None:
            self.name = signal.Signals(number).name
            restore()

        for number in former:
            signal.signal(number, remember)
        try:
            yield self
        finally:
            restore()
