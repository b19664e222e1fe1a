"""The first signal asks to stop; the second acts as if nobody listened."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hyvideo.training.stop_signal import StopSignal
from tests.support.training import REPOSITORY


@pytest.fixture(autouse=True)
def _python_listens() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, nohup with SIGHUP; these tests need handlers."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    former = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "preempted"),
    [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGUSR1, True), (signal.SIGHUP, True)],
)
def test_the_first_signal_is_remembered_by_name(number: signal.Signals, preempted: bool):
    former = signal.getsignal(number)
    with StopSignal().listening() as stop:
        assert stop.of_all_ranks() is None and not stop.preempted() and signal.getsignal(number) is not former
        signal.raise_signal(number)
        assert stop.of_all_ranks() == number.name and stop.preempted() is preempted
    assert signal.getsignal(number) is former


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_preemption_after_the_first_signal_or_sent_twice_ends_nothing(first: signal.Signals):
    with StopSignal().listening() as stop:
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)
        assert stop.name == first.name


def test_the_second_signal_interrupts():
    with pytest.raises(KeyboardInterrupt), StopSignal().listening() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.name == "SIGINT"
        signal.raise_signal(signal.SIGINT)


def test_a_preemption_that_comes_again_later_ends_the_process():
    program = (
        "import signal, hyvideo.training.stop_signal as stop\n"
        "stop.REPEAT_SECONDS = 0.0\n"
        "with stop.StopSignal().listening():\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('heard', flush=True)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('not reached', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "heard\n")


def test_a_lost_terminal_is_ignored_under_nohup():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal().listening() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.name is None
    finally:
        signal.signal(signal.SIGHUP, former)
