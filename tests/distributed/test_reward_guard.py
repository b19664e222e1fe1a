"""A guarded run on two ranks with two rewards, stopped and resumed."""

import json
from pathlib import Path

from hyvideo.checkpoint.train_state import BEST, named_checkpoint
from tests.support.equal_runs import assert_identical, rows_of
from tests.support.ranks import run_on_ranks
from tests.support.rewards import BRIGHTNESS, GUARDED
from tests.support.training import PROMPTS, arguments, training_of, write_prompts


def train_all(runs: list[list[str]]) -> None:
    """Train several runs one after another."""
    for argv in runs:
        training_of(argv).train()


def test_a_guarded_run_of_two_rewards_that_rolls_back_resumes_bit_for_bit_on_two_ranks(tiny_root: Path, tmp_path: Path):
    prompts = write_prompts(tmp_path / "prompts.csv", [f"{prompt} {n}" for n in range(2) for prompt in PROMPTS])
    bright = {"sub_reward": {"brightness": 1.0}}
    settings = GUARDED | {
        "reward_config": json.dumps({"models": {BRIGHTNESS: bright, "moving_shapes": {"sub_reward": {"MQ": 0.1}}}}),
        "reward_guard": json.dumps({"models": {BRIGHTNESS: {"sub_reward": {"brightness": -1.0}}}}),
        "reward_guard_action": "rollback",
        "reward_guard_alpha": 0.9,
        "batch_size": 2,
        "save_interval": 1,
        "keep_last": 20,
        "max_steps": 5,
    }
    whole, parts = (
        [arguments(tiny_root, prompts, tmp_path / name, **{**settings, **changes}) for changes in runs]
        for name, runs in {
            "whole": [{}],
            "parts": [{"max_steps": 3}, {"resume_from_checkpoint": "latest"}],
        }.items()
    )
    run_on_ranks(2, train_all, [*whole, *parts])
    assert_identical(tmp_path / "parts", tmp_path / "whole")
    rates = {row["lr"] for row in rows_of(tmp_path / "whole")}
    assert len(rates) == 2, "no rollback"
    best = [named_checkpoint(tmp_path / name / "checkpoints" / BEST).name for name in ("parts", "whole")]
    assert best[0] == best[1]
