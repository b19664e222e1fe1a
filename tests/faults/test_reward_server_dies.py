"""A reward server that is killed or fails within a round of a real run: the end is the same."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hyvideo.checkpoint.manifest import verify_files
from hyvideo.checkpoint.train_state import latest_checkpoint
from tests.support.command_line import CommandLine, Finished
from tests.support.equal_runs import assert_identical, rows_of
from tests.support.reward_server import server_process
from tests.support.training import arguments

SETTINGS = {
    "max_steps": 3,
    "save_interval": 1,
    "reward_model": "brightness",
    "reward_weights": '{"brightness": 1.0}',
    "reward_batch_size": 4,
    "remote_reward_timeout": 30.0,
    "reward_max_failed": 0.0,
    "resume_from_checkpoint": "latest",
}
"""One request in every round."""


@pytest.fixture
def train(command_line: CommandLine, tiny_root: Path, prompts_csv: Path, tmp_path: Path) -> Callable[..., Finished]:
    """Run in a folder of a name, with a reward server at an address; return how it ended."""

    def run(name: str, url: str, **settings: object) -> Finished:
        chosen = {**SETTINGS, "remote_reward_url": url, **settings}
        return command_line.run("post_train.py", arguments(tiny_root, prompts_csv, tmp_path / name, **chosen))

    return run


@pytest.mark.slow
def test_a_server_that_fails_for_a_while_changes_nothing(train: Callable[..., Finished], tmp_path: Path):
    with server_process(0.0) as (url, _):
        assert train("undisturbed", url).status == 0
    with server_process(0.0, faults=("ok", "stale", "fewer", "malformed")) as (url, _):
        finished = train("run", url)
    assert finished.status == 0, finished.stderr
    assert "have no score" not in finished.stderr
    assert_identical(tmp_path / "run", tmp_path / "undisturbed")


def test_a_killed_server_that_stays_away_ends_the_run_which_goes_on_with_another(train, tmp_path):
    with server_process(0.0) as (living, _), server_process(0.0, faults=("ok", "die")) as (dying, _):
        assert train("undisturbed", living).status == 0
        finished = train("run", dying)
        assert finished.status == 1
        assert f"4 videos have no score by brightness: reward server {dying}" in finished.stderr
        assert "4 of 4 videos could not be scored" in finished.stderr
        assert len(rows_of(tmp_path / "run")) == 1
        verify_files(latest_checkpoint(tmp_path / "run" / "checkpoints"))
        assert train("run", living).status == 0
    assert_identical(tmp_path / "run", tmp_path / "undisturbed")
