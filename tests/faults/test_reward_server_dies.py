"""A reward server that is killed within a round of a real run: it comes back, or it stays away; the end is the same."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hyvideo.checkpoint.manifest import verify_files
from hyvideo.checkpoint.train_state import latest_checkpoint
from tests.support.command_line import CommandLine, Finished
from tests.support.equal_runs import assert_identical, rows_of
from tests.support.ranks import free_port
from tests.support.reward_server import server_process
from tests.support.training import arguments

SETTINGS = {
    "max_steps": 3,
    "save_interval": 1,
    "reward_model": "brightness",
    "reward_weights": '{"brightness": 1.0}',
    "reward_batch_size": 2,
    "remote_reward_in_flight": 1,
    "remote_reward_timeout": 30.0,
    "reward_max_failed": 0.0,
    "resume_from_checkpoint": "latest",
}
"""Two requests of two videos in every round."""

DIES = ("ok", "ok", "ok", "die")
"""Faults of a server that is killed while it has the second half of the second round."""


@pytest.fixture
def train(command_line: CommandLine, tiny_root: Path, prompts_csv: Path, tmp_path: Path) -> Callable[..., Finished]:
    """Start a run with servers, one after another at one address, of the given faults; return how it ended."""

    def train(name: str, *servers: Sequence[str], **settings: object) -> Finished:
        port, ended = free_port(), threading.Event()

        def serve_next() -> None:
            for faults in servers[1:]:
                process.wait()
                with server_process(0.0, port, faults=faults):
                    ended.wait()

        settings = {**SETTINGS, "remote_reward_url": f"http://127.0.0.1:{port}", **settings}
        with server_process(0.0, port, faults=servers[0]) as (_, process):
            others = threading.Thread(target=serve_next)
            others.start()
            argv = arguments(tiny_root, prompts_csv, tmp_path / name, **settings)
            try:
                return command_line.run("post_train.py", argv)
            finally:
                ended.set()
                process.kill()
                others.join()

    return train


@pytest.fixture
def undisturbed(train: Callable[..., Finished], tmp_path: Path) -> Path:
    """The folder of a run whose server lived."""
    assert train("undisturbed", ()).status == 0
    return tmp_path / "undisturbed"


@pytest.mark.slow
def test_a_killed_server_that_comes_back_changes_nothing(train, undisturbed, tmp_path):
    finished = train("run", DIES, ("ok", "stale", "fewer", "malformed"), remote_reward_retries=8)
    assert finished.status == 0, finished.stderr
    assert "have no score" not in finished.stderr
    assert_identical(tmp_path / "run", undisturbed)


def test_a_killed_server_that_stays_away_ends_the_run_which_goes_on_with_another(train, undisturbed, tmp_path):
    finished = train("run", DIES, remote_reward_retries=1)
    assert finished.status == 1
    assert "2 videos have no score by brightness: reward server http://127.0.0.1:" in finished.stderr
    assert "2 of 4 videos could not be scored" in finished.stderr
    assert len(rows_of(tmp_path / "run")) == 1
    verify_files(latest_checkpoint(tmp_path / "run" / "checkpoints"))
    assert train("run", ()).status == 0
    assert_identical(tmp_path / "run", undisturbed)
