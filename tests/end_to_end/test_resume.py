"""An interrupted run, resumed, is the uninterrupted run: every metric but the times, bit for bit."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import CommandLine
from tests.support.equal_runs import rows_of
from tests.support.training import arguments

Row = dict[str, float]
METHODS = {
    "full": {},
    "lora": {"use_lora": True, "lora_r": 2},
    "muon": {"use_muon": True},
    "guided, two updates per round, warm-up": {
        "cfg_scale": 4.0,
        "updates_per_rollout": 2,
        "lr_warmup_steps": 3,
        "sde_type": "cps",
    },
    "fixed anchor, computed in training": {"use_moving_KL": False, "kl_compute_mode": "training_phase"},
}


@pytest.fixture
def train(command_line: CommandLine, tiny_root: Path, prompts_csv: Path):
    """Run post_train.py to its end in a named run folder; returns the rows logged so far."""

    def run(name: str, **settings: Any) -> list[Row]:
        folder = command_line.folder / name
        finished = command_line.run("post_train.py", arguments(tiny_root, prompts_csv, folder, **settings))
        assert finished.status == 0, finished.stderr
        return rows_of(folder)

    return run


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_resumed_run_is_the_uninterrupted_one(train, method: dict[str, Any]):
    whole = train("whole", max_steps=4, **method)
    assert [row["step"] for row in whole] == [1, 2, 3, 4]
    assert any(row["kl/position"] for row in whole)
    assert len({row["grad_norm"] for row in whole}) == 4
    train("parts", max_steps=2, **method)
    assert train("parts", max_steps=4, resume_from_checkpoint="latest", **method) == whole


@pytest.mark.parametrize("end", [1, 3])
def test_a_run_that_ended_within_a_round_may_go_on(train, end: int):
    method = {"updates_per_rollout": 2, "keep_last": 1}
    whole = train("whole", max_steps=5, **method)
    parts = train("parts", max_steps=end, **method)
    assert [row["step"] for row in parts] == list(range(1, end + 1))
    assert train("parts", max_steps=5, resume_from_checkpoint="latest", **method) == whole


def test_a_killed_run_makes_the_lost_steps_again(train, command_line: CommandLine, tiny_root: Path, prompts_csv: Path):
    run = command_line.folder / "killed"
    metrics, latest = run / "metrics.jsonl", run / "checkpoints" / "latest"
    endless = arguments(tiny_root, prompts_csv, run, max_steps=1000, save_interval=3)
    command = command_line.start("post_train.py", endless)
    command.signal_when(signal.SIGKILL, lambda: latest.exists() and len(metrics.read_text().splitlines()) >= 4)
    assert command.wait().status == -signal.SIGKILL

    saved = int(latest.read_text().removeprefix("step_"))
    last = rows_of(run)[-1]["step"] + 1
    resumed = train("killed", max_steps=last, resume_from_checkpoint="latest")
    assert resumed == train("whole", max_steps=last)
    discarded = (run / "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in discarded] == list(range(saved + 1, last))


def test_a_checkpoint_by_path_goes_on_in_a_new_folder(train, command_line: CommandLine):
    train("first", max_steps=2)
    checkpoint = command_line.folder / "first" / "checkpoints" / "step_2"
    onward = train("second", max_steps=3, resume_from_checkpoint=checkpoint)
    assert onward == train("whole", max_steps=3)[2:]
