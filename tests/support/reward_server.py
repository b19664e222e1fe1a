"""A real reward server on a loopback port, in a thread or a process, and one that misbehaves on demand."""

import asyncio
import contextlib
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hyvideo.models.reward_models import rewards
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.models.reward_models.remote import exchange
from tests.support.ranks import free_port
from tests.support.training import REPOSITORY

exchange._FIRST_WAIT_SECONDS = 0.01  # until a failed request is sent again


@contextlib.contextmanager
def requests_limited(**limits: int) -> Iterator[None]:
    """Build rewards that send a failed request again `retries` times, and have `in_flight` requests open at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards, "RewardContext", partial(RewardContext, **limits))
        yield


@contextlib.contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve `app` in a thread; gives its address."""
    options = {"log_config": None, "log_level": "error", "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(app, port=0, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def server_process(seconds: float, reward: str = "Brightness", **options: object) -> Iterator[tuple[str, Any]]:
    """Serve a class of `tests.support.rewards`, under its name in lower case, in a process of its own to be killed."""
    port = free_port()
    program = (
        "import uvicorn; from tests.support import rewards; "
        "from hyvideo.models.reward_models.remote.server import create_app; "
        f"app = create_app({{{reward.lower()!r}: rewards.{reward}(seconds={seconds})}}, **{options!r}); "
        f"uvicorn.run(app, port={port}, log_level='error')"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    try:
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def talking(introduction: str, behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """Answer `/metadata` with `introduction`, and let `behave` treat the sockets of other requests, heads read.

    A client that has gone ends that.
    """

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                head += self.request.recv(1)
            with contextlib.suppress(OSError):
                if head.startswith(b"GET /metadata"):
                    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(introduction)}\r\n\r\n{introduction}"
                    self.request.sendall(answer.encode())
                else:
                    behave(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # so that a large body needs a reader
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


class Faulty:
    """Passes requests to `app`, but for scoring requests takes the next of `faults` first.

    Faults: `hang`, a status, `malformed` (half an answer), `stale` (the answer to an earlier request), `fewer` (a score
    is missing) and `ok`, as after the last one. It counts scoring requests, and the most that were open at one time.
    """

    def __init__(self, app: ASGIApp, faults: Sequence[str] = ()) -> None:
        self._app, self._faults, self._answer = app, list(faults), b"{}"
        self._open = self.requests = self.most_at_once = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope.get("path", "").startswith("/score"):
            await self._app(scope, receive, send)
            return
        self.requests += 1
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        try:
            response = await self._answered(self._faults.pop(0) if self._faults else "ok", scope, receive)
            await response(scope, receive, send)
        finally:
            self._open -= 1

    async def _answered(self, fault: str, scope: Scope, receive: Receive) -> Response:
        if fault == "hang":
            await asyncio.sleep(60)
        if fault.isdigit():
            return Response(b"no", int(fault))
        if fault == "stale":
            return Response(self._answer)
        sent: list[Message] = []

        async def keep(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, keep)
        body = self._answer = b"".join(message.get("body", b"") for message in sent)
        spoiled = {"malformed": body[: len(body) // 2], "fewer": re.sub(rb":\[[^],]+,", b":[", body, count=1)}
        return Response(spoiled.get(fault, body), sent[0]["status"])
