"""The launcher's ranks on one machine: Ctrl-C in the terminal and preemption end them with a checkpoint."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hyvideo.checkpoint.train_state import latest_checkpoint
from tests.support.equal_runs import assert_identical, rows_of
from tests.support.training import REPOSITORY, arguments


def launch(run: Path, root: Path, prompts_csv: Path, **flags: Any) -> subprocess.Popen:
    """Start the launcher with two ranks; what they say goes to `output` beside the run folder."""
    parallel = {"batch_size": 1, "enable_fsdp": True, "sp_size": 1}
    settings = {
        "CONFIG": "configs/tiny.yaml",
        "OUTPUT_DIR": str(run),
        "NPROC_PER_NODE": "2",
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "STOP_GRACE": "600",
    }
    with (run.parent / "output").open("a") as output:
        return subprocess.Popen(
            [REPOSITORY / "run_post_train.sh", *arguments(root, prompts_csv, run, config=None, **parallel, **flags)],
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal signals the whole group
        )


def wait_for(file: Path, launcher: subprocess.Popen) -> None:
    """Wait until a run has written a file."""
    while not file.exists() or not file.read_text():
        assert launcher.poll() is None, "the launcher has ended"
        time.sleep(0.1)


def launch_and_signal(
    tmp_path: Path, root: Path, prompts_csv: Path, send: Callable[[subprocess.Popen], None]
) -> tuple[int, str]:
    """Train on two ranks and signal the launcher after the first update; returns its status and the console's log."""
    run = tmp_path / "run"
    launcher = launch(run, root, prompts_csv, max_steps=10_000)
    wait_for(run / "metrics.jsonl", launcher)
    send(launcher)
    launcher.wait()
    assert latest_checkpoint(run / "checkpoints") is not None, (tmp_path / "output").read_text()
    return launcher.returncode, (run / "console.log").read_text()


@pytest.mark.slow
def test_ctrl_c_saves_and_stops_all_ranks(tmp_path: Path, root_of_four_heads: Path, prompts_csv: Path):
    status, console = launch_and_signal(
        tmp_path, root_of_four_heads, prompts_csv, lambda launcher: os.killpg(launcher.pid, signal.SIGINT)
    )
    assert status == 0
    assert "SIGINT: saved and stopped after step" in console


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preempted_ranks_save_and_the_launcher_asks_to_be_started_again(
    tmp_path: Path, root_of_four_heads: Path, prompts_csv: Path, number: signal.Signals
):
    status, console = launch_and_signal(
        tmp_path, root_of_four_heads, prompts_csv, lambda launcher: launcher.send_signal(number)
    )
    assert status == 75
    assert f"{number.name}: saved and stopped after step" in console


def ranks_in(run: Path) -> dict[str, int]:
    """Return the process of every rank that trains in a folder, by its number."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = dict(
                line.split("=", 1) for line in (process / "environ").read_text().split("\0") if "=" in line
            )
            if variables.get("OUTPUT_DIR") == str(run) and (process / "cmdline").read_bytes():
                found[variables.get("RANK", f"launcher {process.name}")] = int(process.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_rank_that_stands_still_ends_the_launch_and_the_next_one_goes_on(
    tmp_path: Path, root_of_four_heads: Path, prompts_csv: Path, victim: str
):
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = {"save_interval": 1}
    launcher = launch(run, root_of_four_heads, prompts_csv, max_steps=10_000, collective_timeout=15, **settings)
    wait_for(run / "checkpoints" / "latest", launcher)
    os.kill(ranks_in(run)[victim], signal.SIGSTOP)
    began = time.monotonic()
    assert launcher.wait() == 1
    assert time.monotonic() - began < 120  # the collective's timeout, then the 30 s that torchrun gives the others
    assert f"Rank {1 - int(victim)} failed in phase" in (tmp_path / "output").read_text()
    assert ranks_in(run) == {}

    last = rows_of(run)[-1]["step"] + 1
    for folder in (run, whole):
        ended = launch(folder, root_of_four_heads, prompts_csv, max_steps=last, **settings).wait()
        assert ended == 0, (tmp_path / "output").read_text()
    assert_identical(run, whole)
