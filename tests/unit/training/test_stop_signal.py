"""The first signal asks to stop; the second acts as if nobody listened."""

import signal
from collections.abc import Iterator

import pytest

from hyvideo.training.stop_signal import StopSignal


@pytest.fixture(autouse=True)
def _python_listens() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored; these tests are about Python's own handler."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize(
    ("number", "preempted"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGUSR1, True)]
)
def test_the_first_signal_is_remembered_by_name(number: signal.Signals, preempted: bool):
    with StopSignal().listening() as stop:
        assert stop.of_all_ranks() is None
        assert not stop.preempted()
        signal.raise_signal(number)
        assert stop.of_all_ranks() == number.name
        assert stop.preempted() is preempted


def test_the_second_signal_interrupts():
    with pytest.raises(KeyboardInterrupt), StopSignal().listening() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.name == "SIGINT"
        signal.raise_signal(signal.SIGINT)


def test_another_signal_after_the_first_does_not():
    with StopSignal().listening() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.name == "SIGINT"


def test_former_handlers_come_back():
    former = signal.getsignal(signal.SIGINT)
    with StopSignal().listening():
        assert signal.getsignal(signal.SIGINT) is not former
    assert signal.getsignal(signal.SIGINT) is former
