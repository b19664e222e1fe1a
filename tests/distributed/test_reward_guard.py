"""A guarded run of the bundled model on two ranks with two rewards, killed and resumed."""

import json
import os
import signal
from pathlib import Path

import pytest

from hyvideo.checkpoint.train_state import BEST, named_checkpoint
from hyvideo.training import guard
from tests.support.equal_runs import assert_identical, rows_of
from tests.support.ranks import run_on_ranks
from tests.support.rewards import BRIGHTNESS, GUARDED
from tests.support.training import PROMPTS, REPOSITORY, arguments, training_of, write_prompts


def train(argv: list[str], killed_after: int | None = None) -> None:
    """Train a run; every rank is killed when it has made as many updates, before it saves the last one."""
    guard.ALPHA = 0.9  # in a process of its own
    training = training_of(argv)
    run, log = training, training.log

    def log_or_die(*args: object) -> None:
        if run.state.step == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        log(*args)

    run.log = log_or_die
    training.train()


def test_a_guarded_run_that_rolls_back_is_killed_and_resumes_bit_for_bit(tmp_path: Path):
    prompts = write_prompts(tmp_path / "prompts.csv", [f"{prompt} {n}" for n in range(2) for prompt in PROMPTS])
    bright = {"sub_reward": {"brightness": 1.0}}
    settings = GUARDED | {
        "reward_config": json.dumps({"models": {BRIGHTNESS: bright, "moving_shapes": {"sub_reward": {"MQ": 0.1}}}}),
        "reward_guard": json.dumps({"models": {BRIGHTNESS: {"sub_reward": {"brightness": -1.0}}}}),
        **{"reward_guard_action": "rollback", "batch_size": 2, "save_interval": 1, "keep_last": 2, "max_steps": 5},
    }
    whole, killed, resumed = (
        arguments(REPOSITORY / "assets" / "tiny", prompts, tmp_path / name, **settings, **changes)
        for name, changes in (("whole", {}), ("parts", {}), ("parts", {"resume_from_checkpoint": "latest"}))
    )
    run_on_ranks(2, train, whole)
    with pytest.raises(AssertionError, match="rank 1: ended without a result"):
        run_on_ranks(2, train, killed, 4)
    assert len(rows_of(tmp_path / "parts")) == 3
    run_on_ranks(2, train, resumed)
    assert_identical(tmp_path / "parts", tmp_path / "whole")
    rows = rows_of(tmp_path / "whole")
    assert len({row["lr"] for row in rows}) == 2, "no rollback"
    best = [named_checkpoint(tmp_path / name / "checkpoints" / BEST).name for name in ("parts", "whole")]
    assert best[0] == best[1]
