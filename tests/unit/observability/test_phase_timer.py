"""Where the seconds went, where a rank is stuck, and what profile mode records and says."""

import gzip
import json
import re
import time
import timeit
from pathlib import Path

import pytest
import torch
from torch import nn

from hyvideo.observability.phase_timer import BETWEEN, PHASES, PhaseTimer, Watchdog
from hyvideo.observability.profiling import PASSES, Profile, covered, matrix_peak_tflops


def test_time_adds_up_over_the_blocks_of_a_phase_which_is_known_while_it_lasts_and_after_it_failed():
    timer = PhaseTimer("cpu")
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.02)
    seconds = timer.pop()
    assert set(seconds) == {f"time/{phase}" for phase in PHASES}
    assert 0.04 <= seconds["time/rollout"] < 0.5 and seconds["time/update"] == 0.0
    assert set(timer.pop().values()) == {0.0}, "popping starts again at zero"
    with timer("rollout"):
        assert timer.phase == "rollout"
    assert timer.phase == BETWEEN
    with pytest.raises(MemoryError), timer("update"):
        raise MemoryError
    assert timer.phase == "update"


def wait_for_a_server(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize(("seconds", "pauses", "stuck"), [(0.2, [0.75], True), (1.0, [0.4] * 4, False)])
def test_a_stuck_rank_prints_phase_and_stacks_and_one_that_moves_nothing(tmp_path, seconds, pauses, stuck):
    timer, path = PhaseTimer("cpu"), tmp_path / "stderr"
    with path.open("w") as output, Watchdog(timer, rank=3, seconds=seconds, output=output):
        for pause in pauses:
            with timer("reward"):
                wait_for_a_server(pause)
    text = path.read_text()
    assert text.count("in phase 'reward'") in ((2, 3) if stuck else (0,)) and (stuck or text == "")
    assert all((said in text) == stuck for said in ("rank 3: ", "in wait_for_a_server", "Current thread"))


def run_rounds(folder: Path, count: int, *, num_updates: int, updates_per_round=1, passes=1, rank=0, seconds=0.02):
    """Go through rounds of a rollout that sleeps and multiplies and updates; return when the profile was finished."""
    timer, finished, transformer = PhaseTimer("cpu"), [], nn.Linear(64, 64)
    profile = Profile(folder, rank=rank, num_updates=num_updates, timer=timer, transformer=transformer)
    for number in range(count):
        profile.begin_round(last=number == count - 1)
        with timer("rollout"):
            time.sleep(seconds)
            for _ in range(passes):
                transformer(torch.ones(64, 64))
        for update in range(updates_per_round):
            with timer("update"):
                transformer(torch.ones(64, 64)).sum().backward()
            finished.append(profile.end_update(timer.pop(), round_ends=update == updates_per_round - 1))
    profile.finish()
    return finished


def rollout_seconds(table: str) -> float:
    return float(re.search(r"^\| rollout.*?\|(.*?)\|", table, flags=re.MULTILINE)[1])


def events_in(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def test_the_second_round_is_recorded_or_the_only_one_and_of_many_passes_the_first(tmp_path):
    assert run_rounds(tmp_path, 5, num_updates=2) == [False, False, True, False, False]
    assert events_in(tmp_path / "trace_rank0_rollout.json.gz").count("aten::addmm") == 1
    assert any("Backward" in name for name in events_in(tmp_path / "trace_rank0_update.json.gz"))
    table = (tmp_path / "phases.md").read_text()
    assert "over 2 update(s)" in table and 0.02 <= rollout_seconds(table) < 1
    assert "## rollout: the first 2 passes" in table and "aten::addmm" in table
    only = tmp_path / "only"
    assert run_rounds(only, 1, num_updates=9, updates_per_round=2, rank=1) == [False, False]
    names = {path.name for path in only.iterdir()}
    assert names == {f"trace_rank1_{name}.json.gz" for name in ("rollout", "update")}  # phases.md is rank 0's
    run_rounds(tmp_path, 2, num_updates=1, passes=PASSES + 5)  # only the first passes are recorded
    assert events_in(tmp_path / "trace_rank0_rollout.json.gz").count("aten::addmm") == PASSES


@pytest.mark.parametrize(("num_updates", "per_round", "last", "seconds"), [(2, 4, 7, 0.8), (3, 2, 5, 0.4)])
def test_what_whole_rounds_share_is_divided_by_all_of_their_updates(tmp_path, num_updates, per_round, last, seconds):
    finished = run_rounds(tmp_path, 4, num_updates=num_updates, updates_per_round=per_round, seconds=seconds)
    assert finished == [number == last for number in range(4 * per_round)]
    table = (tmp_path / "phases.md").read_text()
    assert "over 4 update(s)" in table and 0.2 <= rollout_seconds(table) < 0.4


def test_the_peak_is_what_a_large_product_reaches_no_number_is_drawn_for_it_and_kernels_at_one_time_count_once():
    matrix = torch.randn(1024, 1024)
    reached = 2 * 1024**3 / min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=10)) / 1e12
    state = torch.get_rng_state()
    assert reached / 5 < matrix_peak_tflops(torch.device("cpu"), torch.float32) < reached * 5
    assert torch.equal(torch.get_rng_state(), state)
    spans = [[], [(0, 2), (5, 6)], [(4, 6), (0, 5)], [(0, 9), (2, 3), (8, 10)]]
    assert [covered(each) for each in spans] == [0, 3, 6, 10]
