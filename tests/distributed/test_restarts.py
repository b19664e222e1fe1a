"""A run that loses a rank starts again by itself where its launcher may, and ends as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.equal_runs import assert_identical, rows_of
from tests.support.ranks import rank_of, run_on_ranks
from tests.support.training import REPOSITORY, arguments, training_of

SETTINGS = {"enable_fsdp": True, "num_generations": 2, "batch_size": 1, "grpo_sampling_steps": 2, "async_save": True}
SETTINGS |= {"rollout_micro_batch_size": 1, "mini_batch_size_per_update": 1, "save_interval": 3, "max_steps": 7}


def train(argv: list[str]) -> None:
    training_of(argv).train()


def test_a_killed_rank_starts_the_run_again_which_ends_as_if_nothing_had_happened(
    tiny_root: Path, prompts_csv: Path, tmp_path: Path
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_on_ranks(2, train, arguments(tiny_root, prompts_csv, whole, **SETTINGS))

    flags = arguments(tiny_root, prompts_csv, killed, **SETTINGS, config=None, max_restarts=1)
    settings = {"PYTHON": sys.executable, "NPROC_PER_NODE": "2", "PREFLIGHT": "0", "OMP_NUM_THREADS": "1"}
    settings["CONFIG"] = "configs/tiny.yaml"
    launcher = subprocess.Popen(
        [REPOSITORY / "run_post_train.sh", *flags], env=os.environ | settings, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300

    def wait_for_row(step: int) -> None:
        while not (killed / "metrics.jsonl").exists() or [row["step"] for row in rows_of(killed)][-1:] < [step]:
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
    told = (
        r"restart 1 of 1 in 5 s, from step 3: rank 1 on \S+ was ended by SIGKILL. Lost: updates 4 to [56] \(.* minutes"
    )
    assert re.search(told, errors) and re.search(told, (killed / "console.log").read_text()), errors
    assert_identical(killed, whole)
