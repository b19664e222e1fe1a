"""The launcher's ranks on one machine: a run that loses one starts again, Ctrl-C and preemption leave a checkpoint."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from hyvideo.checkpoint.train_state import latest_checkpoint
from hyvideo.observability.metrics import read_rows
from tests.support.equal_runs import assert_identical
from tests.support.ranks import rank_of, run_on_ranks
from tests.support.training import REPOSITORY, arguments, train_all

SETTINGS = {"enable_fsdp": True, "num_generations": 2, "batch_size": 1, "grpo_sampling_steps": 2, "async_save": True}
SETTINGS |= {"rollout_micro_batch_size": 1, "mini_batch_size_per_update": 1, "save_interval": 3, "max_steps": 7}

LAUNCH = {"PYTHON": sys.executable, "NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1", "CONFIG": "configs/tiny.yaml"}


def test_a_killed_rank_starts_the_run_again_which_ends_as_if_nothing_had_happened(stock_root, prompts_csv, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_on_ranks(2, train_all, [arguments(stock_root, prompts_csv, whole, **SETTINGS)])

    flags = arguments(stock_root, prompts_csv, killed, **SETTINGS, config=None, max_restarts=1)
    environment = os.environ | LAUNCH | {"PREFLIGHT": "0"}
    command = [REPOSITORY / "run_post_train.sh", *flags]
    launcher = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    metrics, deadline = killed / "metrics.jsonl", time.monotonic() + 300

    def wait_for_row(step: int) -> None:
        while not metrics.exists() or [row["step"] for row in read_rows(metrics)[0]][-1:] < [step]:  # it is growing
            assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()[1]
            time.sleep(0.01)

    wait_for_row(5)  # with async_save step 3 is whole by now
    os.kill(rank_of(killed, 1), signal.SIGKILL)
    began = time.monotonic()
    while not (killed / "metrics.discarded.jsonl").exists():
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()[1]
        time.sleep(0.01)
    wait_for_row(4)
    print(f"{time.monotonic() - began:.1f} s from the kill to the next update")
    errors = launcher.communicate(timeout=300)[1]
    assert launcher.returncode == 0, errors
    told = r"restart 1 of 1 in 5 s, from step 3: rank 1 on \S+ was ended by SIGKILL. "
    told += r"Lost: updates 4 to [56] \(.* minutes"
    assert re.search(told, errors) and re.search(told, (killed / "console.log").read_text()), errors
    assert_identical(killed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "send", "status"), [(signal.SIGINT, os.killpg, 0), (signal.SIGTERM, os.kill, 75)], ids=["Ctrl-C", "TERM"]
)
def test_a_signal_saves_and_stops_all_ranks(tmp_path, stock_root, prompts_csv, number, send, status):
    run = tmp_path / "run"
    parallel = {"config": None, "max_steps": 10_000, "batch_size": 1, "enable_fsdp": True, "sp_size": 1}
    with (tmp_path / "output").open("w") as output:
        command = [REPOSITORY / "run_post_train.sh", *arguments(stock_root, prompts_csv, run, **parallel)]
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}  # as a terminal's group
        environment = os.environ | LAUNCH | {"OUTPUT_DIR": str(run), "STOP_GRACE": "600"}
        launcher = subprocess.Popen(command, env=environment, **options)
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert launcher.poll() is None, "the launcher has ended"
        time.sleep(0.1)
    send(launcher.pid, number)
    assert launcher.wait() == status
    assert latest_checkpoint(run / "checkpoints") is not None, (tmp_path / "output").read_text()
    assert f"{number.name}: saved and stopped after step" in (run / "console.log").read_text()
