"""The SLURM example starts every node with its number and the user's words, and queues a preempted run again.

Stand-ins take the place of srun and scontrol: srun runs what it is given for two nodes, here.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import write_program
from tests.support.training import REPOSITORY as ROOT

SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '%s\\n' first second; else printf '%s\\n' "$*" >>"$CALLS"; fi
"""
SRUN = """#!/usr/bin/env bash
shift
for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || status=$?; done
exit "${status-0}"
"""
NODE = """#!/usr/bin/env bash
printf '%s|' "${RESUME_FROM_CHECKPOINT-}" "$NODE_RANK" "$NNODES" "$MASTER_ADDR:$MASTER_PORT" "$CONFIG" "$@" >>"$CALLS"
echo >>"$CALLS"
exit "$STATUS"
"""


WORDS = ["--run_name", "it's 100% $HOME `id`"]


def run_job(tmp_path: Path, status: int, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run the job of two nodes, which end with `status`; the calls of what it starts are in the file `calls`."""
    scripts = tmp_path / "scripts" / "post_train"
    write_program(tmp_path / "bin" / "scontrol", SCONTROL)
    write_program(tmp_path / "bin" / "srun", SRUN)
    write_program(scripts / "train_grpo.sh", NODE)
    for name in ("slurm_train.sbatch", "run_folder.sh", "checks.sh"):
        shutil.copy(ROOT / "scripts" / "post_train" / name, scripts)
    ours = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": tmp_path / "calls", "STATUS": status}
    job = {"SLURM_SUBMIT_DIR": tmp_path, "SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_NODELIST": "n[1-2]"}
    environment = {name: str(value) for name, value in (job | ours | settings).items()}
    command = ["bash", scripts / "slurm_train.sbatch", *WORDS]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("status", [0, 1, 75])
def test_nodes_get_the_words_and_status_75_queues_the_job_again(tmp_path: Path, status: int):
    begun_with = {"RESUME_FROM_CHECKPOINT": "older"}
    if status == 75:  # queued again, after it has saved
        begun_with["SLURM_RESTART_COUNT"] = "1"
        (tmp_path / "outputs" / "sage_64gpu" / "checkpoints").mkdir(parents=True)
        (tmp_path / "outputs" / "sage_64gpu" / "checkpoints" / "latest").write_text("step_7")
    assert run_job(tmp_path, status, **begun_with).returncode == status
    resumed = "latest" if status == 75 else "older"
    node = "2|first:20007|configs/sage_64gpu.yaml|--run_name|it's 100% $HOME `id`|"
    queued = ["requeue 7"] if status == 75 else []
    assert (tmp_path / "calls").read_text().splitlines() == [f"{resumed}|0|{node}", f"{resumed}|1|{node}", *queued]


@pytest.mark.parametrize("setting", ["SLURM_JOB_ID", "SLURM_RESTART_COUNT"])
@pytest.mark.parametrize("value", ["x[$(touch${IFS}ran)]", "08", str(2**64)])
def test_a_number_of_the_job_is_checked_before_it_is_used(tmp_path: Path, setting: str, value: str):
    finished = run_job(tmp_path, 0, **{setting: value})
    assert finished.returncode == 1 and f"{setting} must be a whole number" in finished.stderr
    assert not (tmp_path / "ran").exists() and not (tmp_path / "calls").exists()
