"""The launcher's ranks on one machine: Ctrl-C in the terminal and preemption end them with a checkpoint."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hyvideo.checkpoint.train_state import latest_checkpoint
from tests.support.training import REPOSITORY, arguments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "send", "status"), [(signal.SIGINT, os.killpg, 0), (signal.SIGTERM, os.kill, 75)], ids=["Ctrl-C", "TERM"]
)
def test_a_signal_saves_and_stops_all_ranks(tmp_path, tiny_root, prompts_csv, number, send, status):
    run = tmp_path / "run"
    parallel = {"config": None, "max_steps": 10_000, "batch_size": 1, "enable_fsdp": True, "sp_size": 1}
    settings = {"CONFIG": "configs/tiny.yaml", "OUTPUT_DIR": str(run), "NPROC_PER_NODE": "2", "PYTHON": sys.executable}
    with (tmp_path / "output").open("w") as output:
        command = [REPOSITORY / "run_post_train.sh", *arguments(tiny_root, prompts_csv, run, **parallel)]
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}  # as a terminal's group
        environment = os.environ | settings | {"OMP_NUM_THREADS": "1", "STOP_GRACE": "600"}
        launcher = subprocess.Popen(command, env=environment, **options)
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert launcher.poll() is None, "the launcher has ended"
        time.sleep(0.1)
    send(launcher.pid, number)
    assert launcher.wait() == status
    assert latest_checkpoint(run / "checkpoints") is not None, (tmp_path / "output").read_text()
    assert f"{number.name}: saved and stopped after step" in (run / "console.log").read_text()
