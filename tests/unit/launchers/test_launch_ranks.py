"""torchrun's ranks that were preempted give their own status; all else is as torchrun has it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from hyvideo.training.stop_signal import LOST, PREEMPTED
from post_train import STATUS_FILE
from scripts.post_train import launch_ranks
from tests.support.training import REPOSITORY


def asked_to_stop(status: str | None, number: signal.Signals = signal.SIGTERM):
    """A torchrun that gets a signal; its ranks have written `status` before."""

    def run(argv: list[str]) -> None:
        if status is not None:
            Path(os.environ[STATUS_FILE]).write_text(status)
        raise SignalException("asked to stop", number)

    return run


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATUS_FILE, "")  # put back after the test


def test_ranks_that_have_saved_give_their_status_and_without_their_word_the_launch_has_failed():
    assert launch_ranks.launch([], asked_to_stop(str(PREEMPTED))) == PREEMPTED == 75
    assert launch_ranks.launch([], asked_to_stop("0", signal.SIGINT)) == 0  # after Ctrl-C they have ended well
    for status in (None, "0", "", "1"):
        with pytest.raises(SignalException):
            launch_ranks.launch([], asked_to_stop(status))


@pytest.mark.parametrize("status", [2, 75])
def test_what_ranks_have_told_is_the_status(tmp_path: Path, status: int):
    script = tmp_path / "rank.py"
    script.write_text(f"import os, time\ntime.sleep(int(os.environ['RANK']))\nraise SystemExit({status})")
    assert launch_ranks.launch(["--standalone", "--nproc_per_node=2", str(script)]) == status


def test_a_rank_that_failed_is_shown_whatever_the_others_say(tmp_path: Path):
    script = tmp_path / "rank.py"
    deaf = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(75))\n"
    script.write_text(f"{deaf}time.sleep(60 * (os.environ['RANK'] == '0'))\nsys.exit(1)\n")
    with pytest.raises(ChildFailedError, match="exitcode *: 1"):
        launch_ranks.launch(["--standalone", "--nproc_per_node=2", str(script)])


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, "rank 1 on {} was ended by SIGKILL"),
        ("sys.exit(69)", LOST, "rank 1 on {} noticed that others are gone, or lost its device"),
    ],
)
def test_a_lost_rank_is_named_unless_another_one_says_why_it_failed(tmp_path, monkeypatch, end, status, told):
    script, lost = tmp_path / "rank.py", tmp_path / "lost"
    monkeypatch.setenv("TRAIN_LOST_FILE", str(lost))
    deaf = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: os._exit({}))\n"
    rank = f"if os.environ['RANK'] == '1': time.sleep(2); {end}\ntime.sleep(60)\n"
    script.write_text(deaf.format(LOST) + rank)
    assert launch_ranks.launch(["--standalone", "--nproc_per_node=2", str(script)]) == status
    assert lost.read_text() == told.format(socket.gethostname())
    script.write_text(deaf.format(1) + rank)
    with pytest.raises(ChildFailedError):
        launch_ranks.launch(["--standalone", "--nproc_per_node=2", str(script)])


def test_no_rank_is_left_however_often_one_asks(tmp_path: Path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, signal, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
        f"(pathlib.Path({str(tmp_path)!r}) / os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "scripts.post_train.launch_ranks", "--standalone", "--nproc_per_node=2", script]
    listening = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    launcher = subprocess.Popen(command, cwd=REPOSITORY, **listening)
    written = [tmp_path / "0", tmp_path / "1"]
    while not all(path.is_file() and path.read_text() for path in written):
        assert launcher.poll() is None
        time.sleep(0.1)
    while launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
        time.sleep(1)
    assert not [path for path in written if Path("/proc", path.read_text()).exists()]


def test_torchrun_gets_its_command_line_and_passes_sigusr1_on():
    received = []
    assert launch_ranks.launch(["--nnodes=2", "post_train.py"], received.extend) == 0
    assert received[1:] == ["--nnodes=2", "post_train.py"]
    assert "SIGUSR1" in received[0].removeprefix("--signals_to_handle=").split(",")
