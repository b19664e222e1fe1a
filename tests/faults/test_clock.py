"""A wall clock that is set back, runs backwards, and files dated in the future: nothing that decides looks at them."""

import os
import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.equal_runs import assert_identical
from tests.support.ranks import free_port, rank_environment
from tests.support.training import REPOSITORY, arguments

YEAR = 365 * 24 * 3600
SHIM = Path(__file__).parent / "backward_clock.c"


def train(argv: list[str], environment: dict[str, str]) -> None:
    """Train on two ranks, in plain processes."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, REPOSITORY / "post_train.py", *argv],
            env=os.environ | rank_environment(rank, 2, port) | {"OMP_NUM_THREADS": "1"} | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_clock_that_is_set_back_changes_nothing(tiny_root: Path, prompts_csv: Path, tmp_path: Path):
    shim = tmp_path / "backward_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, SHIM], check=True)
    settings = {"enable_fsdp": True, "batch_size": 2, "save_interval": 1, "keep_last": 2, "collective_timeout": 120}
    settings |= {"resume_from_checkpoint": "latest", "async_save": True}
    back, whole = tmp_path / "back", tmp_path / "whole"
    for start, max_steps in enumerate((2, 4), start=1):
        earlier = {"LD_PRELOAD": str(shim), "BACKWARD_CLOCK": str(start * 10 * YEAR)}
        train(arguments(tiny_root, prompts_csv, back, **settings, max_steps=max_steps), earlier)
        for number, path in enumerate(sorted(back.rglob("*"), reverse=True)):  # the oldest checkpoint is the newest
            os.utime(path, (2e9 + number, 2e9 + number))
    years = [int(year) for year in re.findall(r"^(\d{4})-.*run folder", (back / "console.log").read_text(), re.M)]
    assert (
        years[0] in range(datetime.now().year - 11, datetime.now().year - 8) and years[1] < years[0]
    )  # the shim works
    train(arguments(tiny_root, prompts_csv, whole, **settings, max_steps=4), {})
    assert_identical(back, whole)
    assert sorted(path.name for path in (back / "checkpoints").iterdir()) == ["latest", "step_3", "step_4"]
