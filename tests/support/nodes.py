"""Two hosts on one machine: network namespaces, a cable between them, reached by pdsh through a stand-in for ssh."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.programs import write_program

ADDRESSES = {"grpo-test-a": "10.213.7.1", "grpo-test-b": "10.213.7.2"}
"""Namespace -> its address."""

# The last two words are the host and the command, which sshd would give to the user's shell on that host.
SSH = """#!/usr/bin/env bash
case "${@: -2:1}" in
%s
*) echo "ssh: no such host" >&2; exit 255 ;;
esac
cd / && exec ip netns exec "$node" env -i PATH="$PATH" HOME="$HOME" sh -c "${@: -1}"
"""


def require_two_nodes() -> None:
    """Skip the test where hosts cannot be made."""
    missing = [name for name in ("pdsh", "ip") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (apt-get install pdsh iproute2)")
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make network namespaces (root)")


@contextmanager
def two_nodes(folder: Path) -> Iterator[dict[str, str]]:
    """Make the hosts; yields the environment in which ssh reaches them.

    Args:
        folder: for the stand-in.
    """
    first, second = ADDRESSES
    _remove()
    try:
        for name in ADDRESSES:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in ADDRESSES.items():
            for command in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                _ip("-n", name, *command)
            _ip("-n", name, "link", "set", "lo", "up")
        cases = "\n".join(f"{address}) node={name} ;;" for name, address in ADDRESSES.items())
        write_program(folder / "ssh", SSH % cases)
        nodes = {"NODE_IP_LIST": ",".join(ADDRESSES.values()), "GLOO_SOCKET_IFNAME": "eth0"}
        yield {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": os.environ["HOME"], **nodes}
    finally:
        _remove()


def processes_of(node: str) -> list[int]:
    """Return the process ids of a host."""
    return [int(line) for line in _ip("netns", "pids", node).split()]


def cut_cable() -> None:
    """Take the link between the hosts down."""
    _ip("-n", next(iter(ADDRESSES)), "link", "set", "eth0", "down")


def _remove() -> None:
    """Remove the hosts, those that an aborted test left too."""
    existing = _ip("netns", "list").split()
    for name in ADDRESSES:
        if name in existing:
            for process in processes_of(name):
                os.kill(process, 9)
            _ip("netns", "del", name)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout
