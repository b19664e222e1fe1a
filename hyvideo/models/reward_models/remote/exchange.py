"""Requests to a server that may hang, die or answer nonsense: limited in time and size, and some are repeated."""

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from hyvideo.models.reward_models.registry import RewardContext, RewardFailureError

MAX_ANSWER_BYTES = 2**24
"""Largest answer in bytes: one about a thousand videos has a hundred kB."""

SHOWN = 300
"""Characters of what a server says that a message repeats, escaped."""

_FIRST_WAIT_SECONDS = 0.5
_Answer = TypeVar("_Answer", bound=BaseModel)
_Asked = TypeVar("_Asked")


class Fault(Exception):
    """The server could not answer this time."""


class Exchange:
    """Asks one server, within the context's limits; many threads may ask at once. A wrong `url` is a ValueError.

    `setting` names the address in messages, and `variable` the environment variable of the bearer token.
    """

    def __init__(self, url: str, token: str | None, context: RewardContext, *, setting: str, variable: str) -> None:
        self._url, self._variable = url, variable
        self._retries, self._timeout = context.retries, context.timeout
        try:
            self._client = httpx.AsyncClient(
                base_url=url,
                headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
                timeout=None,  # one for each read is no limit of the exchange; `_exchange` has one
                limits=httpx.Limits(max_connections=context.in_flight, max_keepalive_connections=0),
            )
        except httpx.InvalidURL as error:
            raise ValueError(f"{setting}: '{url}' is not an address ({error}).") from error
        self._loop = _event_loop()

    def persistently(self, ask: Callable[[], _Asked]) -> _Asked:
        """Ask until there is an answer, with waits that double; a Fault after all retries."""
        for attempt in range(self._retries + 1):
            try:
                return ask()
            except Fault as fault:
                last = fault
                if attempt < self._retries:
                    time.sleep(_FIRST_WAIT_SECONDS * 2**attempt)
        raise Fault(f"reward server {self._url}: {last} ({self._retries + 1} attempts)") from last

    def answer(self, kind: type[_Answer], method: str, path: str, **content: object) -> _Answer:
        """Send one request and read its answer.

        Raises:
            Fault: no answer, a server error, or one that is not understood.
            RewardFailureError: the server refused.
        """
        try:
            exchange = self._exchange(method, path, content)
            status, body = asyncio.run_coroutine_threadsafe(exchange, self._loop).result()
        except TimeoutError as error:
            raise Fault(f"no whole answer within {self._timeout:g} s") from error
        except httpx.RequestError as error:  # its text may repeat what the server sent
            raise Fault(f"no answer ({type(error).__name__}: {str(error)!r:.{SHOWN}})") from error
        text = f"{body[:SHOWN].decode(errors='replace')!r:.{SHOWN}}"
        if status >= 500 or status in (408, 429):
            raise Fault(f"status {status}")
        if status != 200:
            hint = f" (is {self._variable} that of the server?)" if status == 401 else ""
            raise RewardFailureError(f"reward server {self._url} refused with status {status}{hint}: {text}")
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise Fault(f"an answer that is no {kind.__name__}: {text}") from error

    async def _exchange(self, method: str, path: str, content: dict[str, object]) -> tuple[int, bytes]:
        """Send a request; return the status and body of its answer, as it was sent: unpacked it might fill the memory.

        Raises:
            TimeoutError: connecting, sending and receiving, in however small pieces, take more than the timeout in all.
            Fault: the answer is too long.
        """
        body = bytearray()
        async with asyncio.timeout(self._timeout), self._client.stream(method, path, **content) as response:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise Fault(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        return response.status_code, bytes(body)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return a loop in a thread of its own, which can end an exchange in time whatever it waits for."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-requests", daemon=True).start()
    return loop
