"""An interrupted run, resumed, is the uninterrupted run: every metric but the times, bit for bit."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command_line import CommandLine
from tests.support.equal_runs import rows_of
from tests.support.training import ALGORITHMS, arguments, training_of

Row = dict[str, float]
MUCH = {"use_muon": True, "use_lora": True, "cfg_scale": 4.0}
MUCH |= {"updates_per_rollout": 2, "lr_warmup_steps": 3, "sde_type": "cps"}


@pytest.fixture
def train(no_encoding: None, command_line: CommandLine, tiny_root: Path, prompts_csv: Path):
    """Train to the end in a named run folder, in this process; returns the rows logged so far."""

    def run(name: str, **settings: Any) -> list[Row]:
        torch.manual_seed(len(name))  # a run that is resumed finds another state of the libraries' generator
        folder = command_line.folder / name
        training_of(arguments(tiny_root, prompts_csv, folder, **settings)).train()
        return rows_of(folder)

    return run


@pytest.mark.parametrize("method", [MUCH, {"use_moving_KL": False}], ids=["most of it", "fixed anchor"])
def test_a_resumed_run_is_the_uninterrupted_one(train, method: dict[str, Any]):
    whole = train("whole", max_steps=4, **method)
    assert [row["step"] for row in whole] == [1, 2, 3, 4] and any(row["kl/position"] for row in whole)
    assert len({row["grad_norm"] for row in whole}) == 4
    train("parts", max_steps=2, **method)
    assert train("parts", max_steps=4, resume_from_checkpoint="latest", **method) == whole


@pytest.mark.parametrize("algorithm", [ALGORITHMS["grpo"], {**ALGORITHMS["nft"], "use_lora": True, "lora_r": 2}])
def test_a_killed_run_makes_the_lost_steps_again(train, command_line, tiny_root, prompts_csv, algorithm):
    run = command_line.folder / "killed"
    metrics, latest = run / "metrics.jsonl", run / "checkpoints" / "latest"
    endless = arguments(tiny_root, prompts_csv, run, max_steps=1000, save_interval=3, **algorithm)
    command = command_line.start("post_train.py", endless)
    command.signal_when(signal.SIGKILL, lambda: latest.exists() and len(metrics.read_text().splitlines()) >= 4)
    assert command.wait().returncode == -signal.SIGKILL

    saved = int(latest.read_text().removeprefix("step_"))
    last = rows_of(run)[-1]["step"] + 1
    resumed = train("killed", max_steps=last, resume_from_checkpoint="latest", **algorithm)
    assert resumed == train("whole", max_steps=last, **algorithm)
    discarded = (run / "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in discarded] == list(range(saved + 1, last))


def test_a_checkpoint_by_path_goes_on_in_a_new_folder(train, command_line: CommandLine):
    whole = train("whole", max_steps=4)
    train("first", max_steps=2)
    checkpoint = command_line.folder / "first" / "checkpoints" / "step_2"
    train("second", max_steps=3, resume_from_checkpoint=checkpoint)
    onward = train("second", max_steps=4, resume_from_checkpoint="latest")
    assert onward == whole[2:]
    assert "lost" not in (command_line.folder / "second" / "console.log").read_text()


def test_rows_that_were_lost_are_told_and_the_run_goes_on(train, command_line, tiny_root, prompts_csv):
    whole = train("torn", max_steps=4)
    run = command_line.folder / "torn"
    first, second, third, fourth = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(first + second[:40] + b"\n" + third + fourth[:-20])
    argv = arguments(tiny_root, prompts_csv, run, max_steps=5, resume_from_checkpoint="latest")
    resumed = command_line.run("post_train.py", argv)
    assert resumed.returncode == 0, resumed.stderr
    assert f"WARNING: {run}/metrics.jsonl has no row of updates 2, 4: these rows were lost" in resumed.stderr
    assert "the rows of updates 2, 4 are missing" in (run / "report.html").read_text()
    rows = rows_of(run)
    assert [rows[0], rows[1]] == [whole[0], whole[2]] and [row["step"] for row in rows] == [1, 3, 5]
