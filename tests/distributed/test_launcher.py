"""The launcher's ranks on one machine: Ctrl-C in the terminal and preemption end them with a checkpoint."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hyvideo.checkpoint.train_state import latest_checkpoint
from tests.support.training import REPOSITORY, arguments


def launch_and_signal(
    tmp_path: Path, root: Path, prompts_csv: Path, send: Callable[[subprocess.Popen], None]
) -> tuple[int, str]:
    """Train on two ranks and signal the launcher after the first update; returns its status and the console's log."""
    run = tmp_path / "run"
    flags = arguments(root, prompts_csv, run, config=None, batch_size=1, enable_fsdp=True, sp_size=1, max_steps=10_000)
    settings = {
        "CONFIG": "configs/tiny.yaml",
        "OUTPUT_DIR": str(run),
        "NPROC_PER_NODE": "2",
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "STOP_GRACE": "600",
    }
    with (tmp_path / "output").open("w") as output:
        launcher = subprocess.Popen(
            [REPOSITORY / "run_post_train.sh", *flags],
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal signals the whole group
        )
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert launcher.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.1)
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
