"""Requests to a server that may hang, die or answer nonsense: limited in time and size, and some are repeated.

The server is our own, or one with OpenAI's chat protocol (vLLM, SGLang and others).
"""

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Annotated, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from hyvideo.config.outside import as_value_error
from hyvideo.models.reward_models.registry import RewardContext, RewardFailureError
from hyvideo.models.reward_models.remote.wire import checked_token

MAX_ANSWER_BYTES = 2**24
"""Largest answer in bytes: one about a thousand videos has a hundred kB."""

SHOWN = 300
"""Characters of what a server says that a message repeats, escaped."""

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key that a chat server asks for, if it does."""

_FIRST_WAIT_SECONDS = 0.5
_Answer = TypeVar("_Answer", bound=BaseModel)


class Fault(Exception):
    """The server could not answer this time."""


class Exchange:
    """Asks one server, within the context's limits; many threads may ask at once. A wrong `url` is a ValueError.

    `setting` names the address in messages, and `variable` the environment variable of the bearer token.
    """

    def __init__(self, url: str, token: str | None, context: RewardContext, *, setting: str, variable: str) -> None:
        self._url, self._variable = url, variable
        self._retries, self._timeout = context.retries, context.timeout
        with as_value_error(f"{setting}: '{url}' is not an address", httpx.InvalidURL):
            self._client = httpx.AsyncClient(
                base_url=url,
                headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
                timeout=None,  # one for each read is no limit of the exchange; `_exchange` has one
                limits=httpx.Limits(max_connections=context.in_flight, max_keepalive_connections=0),
            )
        self._loop = _event_loop()

    def ask(
        self,
        kind: type[_Answer],
        method: str,
        path: str,
        check: Callable[[_Answer], None] = lambda answer: None,
        **content: object,
    ) -> _Answer:
        """Return an answer that `check` does not refuse by a Fault; waits between attempts double.

        A Fault if there is none after all retries, a RewardFailureError if the server refused.
        """
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
            try:
                answer = self._answer(kind, method, path, content)
                check(answer)
                return answer
            except Fault as fault:
                last = fault
        raise Fault(f"server {self._url}: {last} ({self._retries + 1} attempts)") from last

    def _answer(self, kind: type[_Answer], method: str, path: str, content: dict[str, object]) -> _Answer:
        """Send one request and read its answer; a Fault if there is none, or one that is not understood."""
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
            raise RewardFailureError(f"server {self._url} refused with status {status}{hint}: {text}")
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise Fault(f"an answer that is no {kind.__name__}: {text}") from error

    async def _exchange(self, method: str, path: str, content: dict[str, object]) -> tuple[int, bytes]:
        """Send a request; return the status and body of its answer, as it was sent: unpacked it might fill the memory.

        Connecting, sending and receiving, in however small pieces, take no more than the timeout in all.
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


class _Token(BaseModel):
    token: str
    logprob: Annotated[float, Field(le=0.01)]  # some servers round above 0; what is far above overflows its exponential


class _Position(BaseModel):
    top_logprobs: list[_Token] = []


class _LogProbs(BaseModel):
    content: list[_Position] | None = None


class _Message(BaseModel):
    content: str | None = None


class Choice(BaseModel):
    """What is read of one choice of an answer: the text, why it ends, and the likeliest tokens at each place."""

    message: _Message = _Message()
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None


class _Completion(BaseModel):
    choices: Annotated[list[Choice], Field(min_length=1)]


class ChatServer(Exchange):
    """The model `model` of a chat server at `url`, up to and with `/v1`; many threads may ask at once.

    `setting` names the address in messages; one that is none is a ValueError.
    """

    def __init__(self, url: str, model: str, context: RewardContext, setting: str) -> None:
        token = checked_token(os.environ.get(KEY_VARIABLE), KEY_VARIABLE)
        super().__init__(url, token, context, setting=setting, variable=KEY_VARIABLE)
        self.model = model

    def complete(self, content: list[dict[str, object]], **how: object) -> Choice:
        """Return the answer to texts and images, with `how` it is made; errors as `ask`."""
        request = {"model": self.model, "messages": [{"role": "user", "content": content}], **how}
        return self.ask(_Completion, "POST", "/chat/completions", json=request).choices[0]
