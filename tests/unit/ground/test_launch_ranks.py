"""torchrun's ranks that were preempted give their own status; all else is as torchrun has it."""

import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from hyvideo.training.stop_signal import PREEMPTED
from post_train import STATUS_FILE
from scripts.post_train import launch_ranks


def asked_to_stop(status: str | None):
    """A torchrun that gets SIGTERM; its ranks have written `status` before."""

    def run(argv: list[str]) -> None:
        if status is not None:
            Path(os.environ[STATUS_FILE]).write_text(status)
        raise SignalException("asked to stop", signal.SIGTERM)

    return run


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATUS_FILE, "")  # put back after the test


def test_preempted_ranks_that_have_saved_give_their_status():
    assert launch_ranks.launch([], asked_to_stop(str(PREEMPTED))) == PREEMPTED == 75


@pytest.mark.parametrize("status", [None, "0", "", "1"])
def test_without_their_word_the_launch_has_failed(status: str | None):
    with pytest.raises(SignalException):
        launch_ranks.launch([], asked_to_stop(status))


def test_torchrun_gets_its_command_line_and_passes_sigusr1_on():
    received = []
    assert launch_ranks.launch(["--nnodes=2", "post_train.py"], received.extend) == 0
    assert received[1:] == ["--nnodes=2", "post_train.py"]
    assert "SIGUSR1" in received[0].removeprefix("--signals_to_handle=").split(",")
