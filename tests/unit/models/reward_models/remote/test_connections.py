"""The reward server under clients that hold connections, drip, and fill logs; and the memory that requests take."""

import contextlib
import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from hyvideo.data.videos import write_video
from hyvideo.models.reward_models.remote import connections, server
from hyvideo.models.reward_models.remote.server import create_app
from tests.support.ranks import free_port
from tests.support.reward_server import server_process, serving, started
from tests.support.rewards import Brightness, grey_videos

MEBIBYTE = 2**20
TOKEN = {"Authorization": "Bearer secret"}
RAW = {"request": json.dumps({"prompts": ["a"], "format": "raw", "shape": [5, 32, 32, 3]})}
VIDEO = grey_videos(7)[0].numpy().tobytes()


def score(url: str, reward: str = "brightness", content: bytes = VIDEO, **request: object) -> httpx.Response:
    data = {"request": json.dumps({"prompts": ["a"], **request})} if request else RAW
    return httpx.post(f"{url}/score/{reward}", data=data, files={"videos": content}, headers=TOKEN, timeout=60)


def scoring(seconds: float = 0) -> contextlib.AbstractContextManager[str]:
    return serving(create_app({"brightness": Brightness(seconds=seconds)}, token="secret"))


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """A connection to a server."""
    with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port), timeout=10) as connection:
        yield connection


def seconds_until_closed(connection: socket.socket, drip: bytes) -> float:
    """Send one byte of `drip` every 50 ms until the server has closed the connection."""
    began = time.monotonic()
    connection.settimeout(0.05)
    for number in range(100):
        with contextlib.suppress(TimeoutError), contextlib.suppress(BrokenPipeError):
            connection.sendall(drip[number : number + 1])
            try:
                if not connection.recv(2**16):
                    break
            except ConnectionResetError:
                break
    return time.monotonic() - began


@pytest.fixture(scope="module")
def real_server() -> Iterator[tuple[str, Path]]:
    """The server as a user starts it, but with few files; its address, and everything it writes."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "scripts.serve_reward", "--reward", "moving_shapes", "--port", str(port)]
    environment = os.environ | {"REWARD_TOKEN": "secret"}
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(f"/proc/self/fd/{os.memfd_create('log')}").open("r+b") as log:
        few = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))}
        with started(command, url, stdout=log, stderr=log, env=environment, **few):
            yield url, Path(f"/proc/self/fd/{log.fileno()}")


def test_connections_without_a_request_silence_nobody(real_server):
    url, _ = real_server
    with contextlib.ExitStack() as half_open:
        for number in range(400):
            connection = half_open.enter_context(connected(url))
            with contextlib.suppress(OSError):  # it may have been closed for one of the next
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " if number % 2 else b"")
        began = time.monotonic()
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        assert httpx.get(f"{url}/metadata", timeout=10).status_code == 401
        scored = score(url, "moving_shapes")
        assert scored.status_code == 200 and set(scored.json()["metrics"]) == {"VQ", "MQ", "TA"}
        assert time.monotonic() - began < 5


HEAD = b"POST /score/brightness HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n"


@pytest.mark.parametrize(
    ("sent", "drip"),
    [
        pytest.param(b"", b"", id="silent"),
        pytest.param(b"GET /health HTTP/1.1\r\n", b"X" * 100, id="dripping head"),
        pytest.param(HEAD + b"\r\n", b"x" * 100, id="dripping body of what was refused"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2, b"GET / HTTP/1.1" * 8, id="dripping third head"),
    ],
)
def test_a_connection_that_brings_no_whole_head_is_closed(monkeypatch, sent, drip):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with scoring() as url, connected(url) as connection:
        connection.sendall(sent)
        assert 0.4 < seconds_until_closed(connection, drip) < 2


def test_a_body_that_drips_is_given_up(monkeypatch):
    monkeypatch.setattr(server, "BODY_SECONDS", 0.5)
    with scoring() as url, connected(url) as connection:
        form = b"Content-Type: multipart/form-data; boundary=b\r\nAuthorization: Bearer secret\r\n\r\n--b\r\n"
        connection.sendall(HEAD + form)
        connection.settimeout(5)
        began = time.monotonic()
        answer = connection.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 408") and time.monotonic() - began < 2
        assert score(url).status_code == 200


def test_an_answer_may_take_longer_than_a_head(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with scoring(seconds=1) as url, httpx.Client(base_url=url, headers=TOKEN) as client:
        for _ in range(2):
            answer = client.post("/score/brightness", data=RAW, files={"videos": VIDEO})
            assert answer.json()["metrics"]["brightness"] == [7.0]


def test_of_too_many_connections_the_one_that_is_silent_longest_is_closed(monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    with scoring(seconds=1) as url:
        with ThreadPoolExecutor(1) as pool, connected(url) as first, connected(url) as second:
            scored = pool.submit(score, url)
            assert seconds_until_closed(first, b"") < 1
            with connected(url):
                assert seconds_until_closed(second, b"") < 1
                assert scored.result().status_code == 200


LONG = "%1B[31m" * 9000


def test_nothing_that_a_client_sends_makes_a_long_line_or_escapes(real_server):
    url, log = real_server
    for path in (f"/score/{LONG}", f"/health?{'a' * 60_000}"):
        with connected(url) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n".encode())
            connection.recv(2**16)
    with connected(url) as connection:
        connection.sendall(b"\x1b[31m" * 9000 + b"\r\n\r\n")
        connection.recv(2**16)
    assert score(url, "moving_shapes", b"x", prompts=["\x1b[31m" * 9000]).status_code == 422
    assert httpx.get(f"{url}/health").status_code == 200
    lines = log.read_bytes().splitlines()
    assert b'"GET /health HTTP/1.1" 200' in lines[-1] and len(lines) < 50
    assert max(map(len, lines)) <= connections.MAX_LINE and b"\x1b" not in b"".join(lines)


def test_a_traceback_in_the_log_is_bounded_and_forges_no_line():
    try:
        raise RuntimeError("\x1b[2J" + "x" * 10**6 + "\nINFO: a line of its own\n" + "y\n" * 1000 + "\x07")
    except RuntimeError:
        record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "failed\n", (), sys.exc_info())
    lines = connections.BoundedFormatter("%(levelname)s: %(message)s").format(record).split("\n")
    assert lines[0] == "ERROR: failed" and all(line.startswith("    ") for line in lines[1:])
    assert lines[-1] == "    \\x07" and len(lines) <= 51 and max(map(len, lines)) <= connections.MAX_LINE


def peak(process: int) -> float:
    """Most memory that a process has held, in MiB."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def black(path: Path, num_frames: int) -> bytes:
    """A video of 512x512 pixels: a few kB that are 0.75 MiB per frame when decoded."""
    write_video(path, torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(num_frames, 512, 512, 3), 24)
    return path.read_bytes()


def test_memory_is_bounded_over_the_videos_of_a_request_and_over_requests(tmp_path):
    bomb, large = black(tmp_path / "bomb.mp4", 600), black(tmp_path / "large.mp4", 120)
    half = black(tmp_path / "half.mp4", 80)

    def ask(contents: Sequence[bytes]) -> httpx.Response:
        data = {"request": json.dumps({"prompts": ["a"] * len(contents), "format": "mp4"})}
        files = [("videos", (str(index), content)) for index, content in enumerate(contents)]
        return httpx.post(f"{url}/score/corner", data=data, files=files, timeout=60)

    with server_process(0.3, reward="Corner", max_body_bytes=100 * MEBIBYTE) as (url, process):
        ask([large]).raise_for_status()
        before = peak(process.pid)
        for too_large in ([bomb], [half, half], [bomb] * 10):
            answer = ask(too_large)
            assert answer.status_code == 413, (len(too_large), answer.text)
            assert "start the server with a higher --max_body_mb" in answer.text
        with ThreadPoolExecutor(8) as clients:
            assert {answer.status_code for answer in clients.map(ask, [[large]] * 8)} == {200}
        grown = peak(process.pid) - before
    assert grown < 200, f"{grown:.0f} MiB for requests of at most 100 MiB of frames"
