"""Two hosts of two ranks train the tiny model by the real launcher, which restarts after a lost host and a lost rank.

The hosts are network namespaces of this machine and pdsh is the real one; a stand-in for ssh enters the namespace.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.equal_runs import rows_of
from tests.support.programs import write_program
from tests.support.ranks import rank_of
from tests.support.training import REPOSITORY, arguments

ADDRESSES = {"grpo-test-a": "10.213.7.1", "grpo-test-b": "10.213.7.2"}
"""Namespace -> its address."""
FIRST, SECOND = ADDRESSES
UPDATES = 5
pytestmark = pytest.mark.slow

# The last two words are the host and the command, which sshd would give to the user's shell on that host.
# It outlives a killed host and tells its end, for pdsh takes an ssh that was killed for one that ended well.
SSH = """#!/usr/bin/env bash
case "${@: -2:1}" in
%s
*) echo "ssh: no such host" >&2; exit 255 ;;
esac
cd / && ip netns exec "$node" env -i PATH="$PATH" HOME="$HOME" sh -c "${@: -1}"
exit "$?"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Make the hosts; yields the environment of a launch, in which ssh reaches them."""
    if missing := [name for name in ("pdsh", "ip") if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)} (apt-get install pdsh iproute2)")
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make network namespaces (root)")
    _remove()
    try:
        for name in ADDRESSES:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", FIRST, "type", "veth", "peer", "name", "eth0", "netns", SECOND)
        for name, address in ADDRESSES.items():
            for command in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                _ip("-n", name, *command)
            _ip("-n", name, "link", "set", "lo", "up")
        cases = "\n".join(f"{address}) node={name} ;;" for name, address in ADDRESSES.items())
        write_program(tmp_path / "ssh", SSH % cases)
        nodes = {"NODE_IP_LIST": ",".join(ADDRESSES.values()), "GLOO_SOCKET_IFNAME": "eth0"}
        python = {"PYTHON": sys.executable, "NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
        yield {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": os.environ["HOME"], **nodes, **python}
    finally:
        _remove()


def processes_of(node: str) -> list[int]:
    return [int(line) for line in _ip("netns", "pids", node).split()]


def _remove() -> None:
    existing = _ip("netns", "list").split()
    for name in ADDRESSES:
        if name in existing:
            for process in processes_of(name):
                os.kill(process, 9)
            _ip("netns", "del", name)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


class Launch:
    def __init__(self, cluster: dict[str, str], folder: Path, root: Path, csv: Path, **settings: object) -> None:
        self.folder = folder
        chosen = {"config": None, "max_steps": UPDATES, "save_interval": 1, "batch_size": 1, **settings}
        flags = arguments(root, csv, folder, **chosen)
        environment = cluster | {"CONFIG": "configs/tiny.yaml", "OUTPUT_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
        command = [REPOSITORY / "run_post_train_multinode.sh", *flags, "--sp_size", "2", "--enable_fsdp", "true"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        self.process = subprocess.Popen(command, env=environment, **options)

    def rows(self) -> list[dict]:
        return rows_of(self.folder) if (self.folder / "metrics.jsonl").exists() else []

    def wait_for_row(self, count: int) -> None:
        deadline = time.monotonic() + 900
        while len(self.rows()) < count:
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()[0]
            time.sleep(0.1)

    def end(self, timeout: float) -> tuple[int, str]:
        output = self.process.communicate(timeout=timeout)[0]
        return self.process.returncode, output


@pytest.fixture
def launch(cluster: dict[str, str], tmp_path: Path, stock_root: Path, prompts_csv: Path):
    def start(name: str, environment: dict[str, str] | None = None, **settings: object) -> Launch:
        return Launch(cluster | (environment or {}), tmp_path / name, stock_root, prompts_csv, **settings)

    return start


def test_after_a_killed_host_and_a_killed_rank_a_run_restarts_and_ends_as_if_nothing_had_happened(launch):
    undisturbed = launch("undisturbed")
    status, output = undisturbed.end(1200)
    assert status == 0, output
    assert "dry run: 4 rank(s)" in output and len(undisturbed.rows()) == UPDATES
    logs = undisturbed.folder.glob("logs/*/node_*/*/attempt_*/*/stdout.log")
    assert {path.parts[-5] + path.parts[-2] for path in logs} == {"node_00", "node_01", "node_10", "node_11"}

    run = launch("a run with a 'quote' & 100%", {"PREFLIGHT": "0", "MAX_RESTARTS": "2"})
    run.wait_for_row(2)
    for process in processes_of(SECOND):
        os.kill(process, signal.SIGKILL)
    killed = time.monotonic()
    while processes_of(FIRST):
        assert time.monotonic() - killed < 30
        time.sleep(0.1)
    run.wait_for_row(4)
    os.kill(rank_of(run.folder, 3), signal.SIGKILL)
    status, output = run.end(1200)
    assert status == 0 and output.count("stopping all nodes") == 2 and output.count("resumed from") == 2, output
    for number in (1, 2):
        told = f"restart {number} of 2 in 5 s, from step [1-4]: {ADDRESSES[SECOND]} \\(node 1\\) ended with status 137"
        assert re.search(f"{told} \\(SIGKILL\\). Lost: ", output), output
    assert run.rows() == undisturbed.rows()


def test_a_cut_cable_stops_all_within_the_collective_timeout(launch):
    run = launch("run", {"PREFLIGHT": "0"}, collective_timeout=20)
    run.wait_for_row(1)
    _ip("-n", FIRST, "link", "set", "eth0", "down")
    status, output = run.end(120)
    assert status != 0, output
    assert processes_of(FIRST) == [] and processes_of(SECOND) == []
