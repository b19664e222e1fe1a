"""Two runs in one folder: one trains as if it were alone, the other ends with status 2 and changes nothing."""

import re
import signal
import time
from pathlib import Path

import pytest

from hyvideo.config.loading import load_saved_config
from tests.support.command_line import Command, CommandLine
from tests.support.equal_runs import assert_identical
from tests.support.run_folders import contents
from tests.support.training import arguments

REFUSALS = "another process is training in|another run has written to|already holds a run"


@pytest.fixture
def start(command_line: CommandLine, root_of_four_heads: Path, prompts_csv: Path):
    """Start a run of two updates in a folder of the working directory, with a fault or without."""

    def begin(folder: str, fault: str = "", **settings: object) -> Command:
        settings = {"max_steps": 2, "trackers": ["tensorboard"], **settings}
        argv = arguments(root_of_four_heads, prompts_csv, command_line.folder / folder, **settings)
        script = "tests/support/faulty_post_train.py" if fault else "post_train.py"
        return command_line.start(script, argv, {"FAULT": fault, "FAULT_AFTER": "0"})

    return begin


@pytest.mark.parametrize("used", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["new", "used"])
def test_of_two_that_start_at_once_one_trains_alone(start, command_line: CommandLine, used: bool):
    resume, seeds = {"resume_from_checkpoint": "latest", "seed": 1}, (1, 2)
    if used:
        for folder in ("both", "alone1"):
            assert start(folder, **resume, max_steps=1).wait().returncode == 0
        seeds = (1, 1)
    runs = [start("both", **resume | {"seed": seed}) for seed in seeds]
    finished = [run.wait() for run in runs]
    assert sorted(one.returncode for one in finished) == [0, 2], finished
    (refused,) = (one for one in finished if one.returncode == 2)
    assert re.search(REFUSALS, refused.stderr) and "Traceback" not in refused.stderr
    both = command_line.folder / "both"
    seed = load_saved_config(both / "config.yaml").run.seed
    assert [one.returncode for one, own in zip(finished, seeds, strict=True) if own == seed].count(0) == 1
    assert start(f"alone{seed}", **resume | {"seed": seed}).wait().returncode == 0
    assert_identical(both, command_line.folder / f"alone{seed}")
    assert (both / "console.log").read_text().count("run folder") == 1 + used
    assert len(list((both / "tb").glob("events*"))) == 1 + used


def test_runs_that_ended_while_others_were_loading_are_left_as_they_are(start, command_line: CommandLine):
    slow = [
        start("run", "it is stopped while it loads", seed=2, resume_from_checkpoint=wanted)
        for wanted in ("latest", None)
    ]
    deadline = time.monotonic() + 120
    for run in slow:
        while "\nState:\tT" not in Path(f"/proc/{run.pid}/status").read_text():
            assert run.is_alive() and time.monotonic() < deadline, run.read("stderr")
            time.sleep(0.05)
    assert start("run", seed=1).wait().returncode == 0
    before = contents(command_line.folder / "run")
    for run in slow:
        run.signal(signal.SIGCONT)
        refused = run.wait()
        assert refused.returncode == 2 and re.search(REFUSALS, refused.stderr), refused.stderr
    assert contents(command_line.folder / "run") == before
