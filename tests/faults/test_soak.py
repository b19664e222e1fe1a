"""A long run of one process: memory and file handles stay flat, the disk bounded, and it can be resumed at its end."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.command_line import Command
from tests.support.equal_runs import rows_of
from tests.support.training import arguments

SETTINGS = {"batch_size": 2, "grpo_sampling_steps": 2, "mini_batch_size_per_update": 4, "updates_per_rollout": 2}
SETTINGS |= {"validation_interval": 100, "save_interval": 10, "keep_last": 2, "async_save": True}
SETTINGS |= {"resume_from_checkpoint": "latest", "trackers": ["tensorboard"]}


def usage_of(command: Command, folder: Path) -> dict[str, float]:
    """What a run uses after `step` updates: MB of memory, open files, MB of logs, and checkpoints on disk."""
    process = Path("/proc") / str(command.pid)
    resident = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS"))
    megabytes = sum(path.stat().st_size for path in (*folder.glob("*.*"), *folder.glob("tb/*"))) / 2**20
    found = {"step": json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"], "logs": megabytes}
    found |= {"memory": int(resident.split()[1]) / 1024, "files": len(list((process / "fd").iterdir()))}
    return found | {"checkpoints": len(list(folder.glob("checkpoints/step_*")))}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc (Linux)")
@pytest.mark.parametrize("num_updates", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_nothing_grows_but_the_logs(command_line, root_of_four_heads, prompts_csv, num_updates):
    run = command_line.folder / "run"
    argv = arguments(root_of_four_heads, prompts_csv, run, **{**SETTINGS, "max_steps": num_updates + 20})
    command = command_line.start("post_train.py", argv)
    usages: list[dict[str, float]] = []
    while not usages or usages[-1]["step"] < num_updates:
        assert command.is_alive(), command.wait()
        time.sleep(0.2)
        if (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size:
            try:
                usages.append(usage_of(command, run))
            except (FileNotFoundError, json.JSONDecodeError):
                continue  # a checkpoint was just dropped, or a row is half written
    command.signal(signal.SIGTERM)
    assert command.wait().returncode == 75

    settled = [usage for usage in usages if usage["step"] >= num_updates / 2]
    steps = [usage["step"] for usage in settled]
    slopes = {name: np.polyfit(steps, [usage[name] for usage in settled], 1)[0] * 1000 for name in ("memory", "logs")}
    if num_updates >= 1000:
        assert slopes["memory"] < 10
    assert slopes["logs"] < 10  # metrics, TensorBoard, console and report: some KB per update
    assert max(usage["checkpoints"] for usage in settled) <= SETTINGS["keep_last"] + 2  # one begun, one replaced
    assert max(usage["files"] for usage in settled) <= min(usage["files"] for usage in settled) + 12  # those of a save
    finished = command_line.run("post_train.py", argv)
    assert finished.returncode == 0, finished.stderr
    assert [row["step"] for row in rows_of(run)] == list(range(1, num_updates + 21))
    assert len(list((run / "checkpoints").glob("step_*"))) == SETTINGS["keep_last"]
