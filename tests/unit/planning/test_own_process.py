"""What is called in a process of its own answers, fails and ends as a call does, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyvideo.planning.own_process import in_own_process


def refuse(number: int) -> None:
    raise ValueError(f"not {number}")


def test_calls_share_one_process_that_is_not_this_one():
    assert in_own_process(os.getpid) == in_own_process(os.getpid) != os.getpid()


def test_an_error_is_raised_here_with_the_place_where_it_arose():
    with pytest.raises(ValueError, match="not 7") as caught:
        in_own_process(refuse, 7)
    assert "in refuse" in caught.value.__notes__[0]


def test_a_killed_process_is_told_and_replaced():
    killed = in_own_process(os.getpid)
    with pytest.raises(RuntimeError, match="was killed"):
        in_own_process(os.kill, killed, signal.SIGKILL)
    assert in_own_process(os.getpid) != killed


@pytest.mark.parametrize("waiting", ["time.sleep(60)", "in_own_process(time.sleep, 60)"], ids=["idle", "at work"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_asked(number: int, waiting: str, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\nfrom hyvideo.planning.own_process import in_own_process\n"
        f"if __name__ == '__main__':\n    print(in_own_process(os.getpid), flush=True)\n    {waiting}\n"
    )
    repository = {"PYTHONPATH": str(Path(__file__).parents[3])}
    asking = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=os.environ | repository)
    asked = int(asking.stdout.readline())
    time.sleep(0.5)  # it is at work by now
    asking.send_signal(number)
    asking.wait()
    until = time.monotonic() + 20
    while Path(f"/proc/{asked}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{asked}").exists()
