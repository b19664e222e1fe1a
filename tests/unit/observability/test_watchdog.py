"""A stuck phase is reported with its name and stack, a moving one is not."""

import time
from pathlib import Path

from hyvideo.observability.phase_timer import PhaseTimer
from hyvideo.observability.watchdog import Watchdog


def printed(path: Path, seconds: float, pauses: list[float]) -> str:
    """What is said of a rank that spends these seconds in phases, one after the other."""
    timer = PhaseTimer("cpu")
    with path.open("w") as output, Watchdog(timer, rank=3, seconds=seconds, output=output):
        for pause in pauses:
            with timer("reward"):
                wait_for_a_server(pause)
    return path.read_text()


def wait_for_a_server(seconds: float) -> None:
    time.sleep(seconds)


def test_a_stuck_rank_prints_its_phase_and_the_stack_of_each_thread_again_and_again(tmp_path: Path):
    text = printed(tmp_path / "stderr", 0.2, [0.75])
    assert "rank 3: " in text
    assert text.count("in phase 'reward'") in (2, 3)
    assert "in wait_for_a_server" in text
    assert "Current thread" in text


def test_a_rank_that_moves_prints_nothing(tmp_path: Path):
    assert printed(tmp_path / "stderr", 1.0, [0.4] * 4) == ""
