"""The phase timer says where the seconds went."""

import time

import pytest

from hyvideo.observability.phase_timer import BETWEEN, PHASES, PhaseTimer


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


def test_an_unknown_phase_is_refused_with_the_known_ones():
    with (
        pytest.raises(ValueError, match="Unknown phase 'rolout': expected one of rollout, reward"),
        PhaseTimer("cpu")("rolout"),
    ):
        pass


def test_the_phase_is_known_while_it_lasts_and_after_it_failed():
    timer = PhaseTimer("cpu")
    with timer("rollout"):
        assert timer.phase == "rollout"
    assert timer.phase == BETWEEN
    with pytest.raises(MemoryError), timer("update"):
        raise MemoryError
    assert timer.phase == "update"
