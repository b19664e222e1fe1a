"""Profile mode: which updates are recorded, and what the table says about them."""

import gzip
import json
import time
from pathlib import Path

import torch

from hyvideo.observability.phase_timer import PhaseTimer
from hyvideo.observability.profiling import Profile


def run_rounds(profile: Profile, count: int, updates_per_round: int = 1) -> list[bool]:
    """Go through rounds of a rollout that sleeps and updates that multiply; return when the profile was finished."""
    timer, finished = PhaseTimer("cpu"), []
    for number in range(count):
        profile.begin_round(last=number == count - 1)
        with timer("rollout"):
            time.sleep(0.02)
        for _ in range(updates_per_round):
            with timer("update"):
                torch.ones(64, 64) @ torch.ones(64, 64)
            finished.append(profile.end_update())
    profile.finish()
    return finished


def phases_in(folder: Path, rank: int = 0) -> list[str]:
    """Names of the phases in the trace, one per time they were entered."""
    events = json.loads(gzip.decompress((folder / f"trace_rank{rank}.json.gz").read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("name", "").startswith("phase/") and event["ph"] == "X"]


def test_the_first_round_warms_up_and_recording_ends_after_so_many_updates(tmp_path: Path):
    profile = Profile(tmp_path / "profile", rank=0, num_updates=2)
    assert run_rounds(profile, 5) == [False, False, True, False, False]
    assert phases_in(profile.folder) == ["phase/rollout", "phase/update"] * 2
    table = (profile.folder / "phases.md").read_text()
    assert "over 2 update(s)" in table
    (row,) = [line for line in table.splitlines() if line.startswith("| rollout")]
    assert 0.02 <= float(row.split("|")[2]) < 1
    assert "aten::mm" in table


def test_a_run_of_one_round_is_recorded_from_its_beginning_and_to_its_end(tmp_path: Path):
    profile = Profile(tmp_path / "profile", rank=1, num_updates=9)
    assert run_rounds(profile, 1, updates_per_round=2) == [False, False]
    assert phases_in(profile.folder, rank=1) == ["phase/rollout", "phase/update", "phase/update"]
    assert not (profile.folder / "phases.md").exists()  # which rank 0 writes
