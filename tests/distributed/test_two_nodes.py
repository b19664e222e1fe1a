"""Two hosts of two ranks train the tiny model by the real launcher; one is killed, and a restart goes on from there.

The hosts are network namespaces of this machine and pdsh is the real one; a stand-in for ssh enters the namespace.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyvideo.checkpoint.train_state import latest_checkpoint
from tests.support.equal_runs import rows_of
from tests.support.nodes import ADDRESSES, cut_cable, processes_of, require_two_nodes, two_nodes
from tests.support.training import REPOSITORY, arguments

pytestmark = pytest.mark.slow
FIRST, SECOND = ADDRESSES
UPDATES = 4


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a launch on two hosts."""
    require_two_nodes()
    with two_nodes(tmp_path) as environment:
        yield environment | {"PYTHON": sys.executable, "NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}


class Launch:
    """A running launcher of a run in `folder`."""

    def __init__(self, cluster: dict[str, str], folder: Path, root: Path, csv: Path, **settings: object) -> None:
        self.folder = folder
        chosen = {"config": None, "max_steps": UPDATES, "save_interval": 1, "batch_size": 1, **settings}
        flags = arguments(root, csv, folder, **chosen)
        environment = cluster | {"CONFIG": "configs/tiny.yaml", "OUTPUT_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [REPOSITORY / "run_post_train_multinode.sh", *flags, "--sp_size", "2", "--enable_fsdp", "true"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def rows(self) -> list[dict]:
        """The metrics so far, without times."""
        return rows_of(self.folder) if (self.folder / "metrics.jsonl").exists() else []

    def wait_for_row(self, count: int) -> None:
        """Wait until so many updates are made."""
        deadline = time.monotonic() + 900
        while len(self.rows()) < count:
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()[0]
            time.sleep(0.1)

    def end(self, timeout: float) -> tuple[int, str]:
        """Return the status and what was printed."""
        output = self.process.communicate(timeout=timeout)[0]
        return self.process.returncode, output


def logs_of(folder: Path) -> set[str]:
    """Node and local rank of every log that is there."""
    files = folder.glob("logs/*/node_*/*/attempt_*/*/stdout.log")
    return {f"{path.parts[-5]}/{path.parts[-2]}" for path in files}


@pytest.fixture
def launch(cluster: dict[str, str], tmp_path: Path, root_of_four_heads: Path, prompts_csv: Path):
    """Start a run by its folder's name."""

    def start(name: str, environment: dict[str, str] | None = None, **settings: object) -> Launch:
        """Start it, with more of an environment."""
        return Launch(cluster | (environment or {}), tmp_path / name, root_of_four_heads, prompts_csv, **settings)

    return start


def test_a_killed_host_stops_all_and_a_restart_ends_as_if_nothing_had_happened(launch):
    undisturbed = launch("undisturbed")
    status, output = undisturbed.end(1200)
    assert status == 0, output
    assert "dry run: 4 rank(s)" in output and len(undisturbed.rows()) == UPDATES
    assert logs_of(undisturbed.folder) == {"node_0/0", "node_0/1", "node_1/0", "node_1/1"}

    run = launch("a run with a 'quote' & 100%", {"PREFLIGHT": "0"})
    run.wait_for_row(2)
    for process in processes_of(SECOND):
        os.kill(process, signal.SIGKILL)
    killed = time.monotonic()
    status, output = run.end(60)
    took = time.monotonic() - killed
    print(f"stopped {took:.1f} s after the host was killed")
    assert status != 0 and "stopping all nodes" in output, output
    assert processes_of(FIRST) == [] and took < 30
    assert latest_checkpoint(run.folder / "checkpoints") is not None

    again = launch("a run with a 'quote' & 100%", {"PREFLIGHT": "0"})
    status, output = again.end(1200)
    assert status == 0 and "resumed from" in output, output
    assert again.rows() == undisturbed.rows()


def test_a_cut_cable_stops_all_within_the_collective_timeout(launch):
    run = launch("run", {"PREFLIGHT": "0"}, collective_timeout=20)
    run.wait_for_row(1)
    cut_cable()
    cut = time.monotonic()
    status, output = run.end(120)
    print(f"stopped {time.monotonic() - cut:.1f} s after the cable was cut")
    assert status != 0, output
    assert processes_of(FIRST) == [] and processes_of(SECOND) == []
