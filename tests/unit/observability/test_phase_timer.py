"""The phase timer says where the seconds went, and the watchdog where a rank is stuck; a moving one is not."""

import time
from pathlib import Path

import pytest

from hyvideo.observability.phase_timer import BETWEEN, PHASES, PhaseTimer, Watchdog


def test_time_of_a_phase_adds_up_over_its_blocks_and_other_phases_stay_at_zero():
    timer = PhaseTimer("cpu")
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.02)
    seconds = timer.pop()
    assert set(seconds) == {f"time/{phase}" for phase in PHASES}
    assert 0.04 <= seconds["time/rollout"] < 0.5
    assert seconds["time/update"] == 0.0
    assert set(timer.pop().values()) == {0.0}, "popping starts again at zero"


def test_the_phase_is_known_while_it_lasts_and_after_it_failed():
    timer = PhaseTimer("cpu")
    with timer("rollout"):
        assert timer.phase == "rollout"
    assert timer.phase == BETWEEN
    with pytest.raises(MemoryError), timer("update"):
        raise MemoryError
    assert timer.phase == "update"


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


def test_a_stuck_rank_prints_its_phase_and_the_stack_of_each_thread_again_and_again(tmp_path):
    text = printed(tmp_path / "stderr", 0.2, [0.75])
    assert "rank 3: " in text
    assert text.count("in phase 'reward'") in (2, 3)
    assert "in wait_for_a_server" in text
    assert "Current thread" in text


def test_a_rank_that_moves_prints_nothing(tmp_path):
    assert printed(tmp_path / "stderr", 1.0, [0.4] * 4) == ""
