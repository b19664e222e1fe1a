"""The launcher's ranks on one machine: a Ctrl-C in the terminal ends them after the round, with a checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyvideo.checkpoint.train_state import latest_checkpoint
from tests.support.training import REPOSITORY, arguments


@pytest.mark.slow
def test_ctrl_c_saves_and_stops_all_ranks(tmp_path: Path, root_of_four_heads: Path, prompts_csv: Path):
    run = tmp_path / "run"
    flags = arguments(
        root_of_four_heads, prompts_csv, run, config=None, batch_size=1, enable_fsdp=True, sp_size=1, max_steps=10_000
    )
    settings = {
        "CONFIG": "configs/tiny.yaml",
        "OUTPUT_DIR": str(run),
        "NPROC_PER_NODE": "2",
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
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
        os.killpg(launcher.pid, signal.SIGINT)
        launcher.wait()
    console = (run / "console.log").read_text()
    assert "SIGINT: saved and stopped after step" in console, (tmp_path / "output").read_text()
    assert latest_checkpoint(run / "checkpoints") is not None
