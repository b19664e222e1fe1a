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


def test_a_stuck_rank_prints_its_phase_and_the_stack_of_each_thread(tmp_path: Path):
    text = printed(tmp_path / "stderr", 0.2, [0.5])
    assert "rank 3: " in text
    assert "in phase 'reward' (stuck_after 0.2)" in text
    assert "in wait_for_a_server" in text
    assert "Current thread" in text


def test_it_prints_again_after_as_many_more_seconds(tmp_path: Path):
    assert printed(tmp_path / "stderr", 0.2, [0.75]).count("in phase 'reward'") in (2, 3)


def test_a_rank_that_moves_prints_nothing(tmp_path: Path):
    assert printed(tmp_path / "stderr", 1.0, [0.4] * 4) == ""


def test_zero_seconds_switch_it_off(tmp_path: Path):
    assert printed(tmp_path / "stderr", 0, [0.1]) == ""
