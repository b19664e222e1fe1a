"""What is called in a process of its own answers, fails and ends as a call does, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyvideo.planning.own_process import in_own_processes


def refuse(number: int) -> None:
    raise ValueError(f"not {number}")


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def own() -> int:
    return in_own_processes(os.getpid, [()])[0]


def test_calls_share_processes_of_their_own_whose_errors_are_raised_here_and_which_are_replaced_when_killed():
    assert len({own() for _ in range(4)}) <= 2 and own() != os.getpid()
    assert in_own_processes(pow, [(2, 3), (3, 2)]) == [8, 9]
    with pytest.raises(ValueError, match="not 7") as caught:
        in_own_processes(refuse, [(7,)])
    assert "in refuse" in str(caught.value.__cause__)
    killed = own()
    with pytest.raises(RuntimeError, match="was killed"):
        in_own_processes(end, [()])
    assert own() != killed


@pytest.mark.parametrize(
    "waiting", ["time.sleep(60)", "own_process.in_own_processes(time.sleep, [(60,)])"], ids=["idle", "at work"]
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_asked(number: int, waiting: str, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\nfrom hyvideo.planning import own_process\nown_process.PRELOADED = []\n"
        "if __name__ == '__main__':\n"
        f"    print(own_process.in_own_processes(os.getpid, [()])[0], flush=True)\n    {waiting}\n"
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
