"""A reward that a server computes. Temporary failures are retried; a refusal stops the run."""

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import httpx
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from hyvideo.config.schema import RewardConfig
from hyvideo.models.reward_models.registry import RewardContext, RewardFailureError, RewardModel, Videos
from hyvideo.models.reward_models.remote.wire import (
    TOKEN_VARIABLE,
    Metadata,
    ScoreRequest,
    ScoreResponse,
    checked_token,
    digest,
)

MAX_ANSWER_BYTES = 2**24
"""Largest answer in bytes: one about a thousand videos has a hundred kB."""

FORM_BYTES = 512
"""Allowance for what a form adds to each video."""

_FIRST_WAIT_SECONDS = 0.5
_SHOWN = 300  # characters of what a server says that a message repeats, escaped
_Answer = TypeVar("_Answer", bound=BaseModel)
_LOG = logging.getLogger(__name__)


class _Fault(Exception):
    """The server could not answer this time."""


class RemoteReward(RewardModel):
    """A reward of a server, called as if it were here; many threads may call it at once.

    Raises:
        ValueError: the token is no header, or the server does not answer, refuses the token, does not have this reward
            or takes raw videos to have another frame rate than the run's.
    """

    def __init__(self, context: RewardContext, name: str, url: str, config: RewardConfig) -> None:
        super().__init__(context)
        self._name, self._url = name, url
        self._retries, self._timeout = config.remote_reward_retries, config.remote_reward_timeout
        token = checked_token(os.environ.get(TOKEN_VARIABLE))
        try:
            self._client = httpx.AsyncClient(
                base_url=url,
                headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
                timeout=None,  # one for each read is no limit of the exchange; `_exchange` has one
                limits=httpx.Limits(max_connections=config.remote_reward_in_flight, max_keepalive_connections=0),
            )
        except httpx.InvalidURL as error:
            raise ValueError(f"remote_reward_url: '{url}' is not an address ({error}).") from error
        self._loop = _event_loop()
        try:
            metadata = self._persistently(lambda: self._answer(Metadata, "GET", "/metadata"))
        except (_Fault, RewardFailureError) as error:
            raise ValueError(f"remote_reward_url: {error}") from error
        if name not in metadata.rewards:
            raise ValueError(
                f"reward_model: the server {url} has no reward '{name}'; it has {', '.join(metadata.rewards)[:_SHOWN]}."
            )
        if metadata.video_fps != context.video_fps:
            raise ValueError(
                f"video_fps is {context.video_fps}, but the reward server {url} takes videos to have "
                f"{metadata.video_fps}: start it with --video_fps {context.video_fps}."
            )
        self._max_body_bytes, facts = metadata.max_body_bytes, metadata.rewards[name]
        self.metrics, self.reads, self._description = facts.metrics, facts.reads, facts.description
        self._not_for: set[str] = set()

    def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score videos on the server; NaN for all of them, and a warning, where it keeps failing.

        What is larger than the server reads is sent in two halves. A refusal, which trying again would not change, is a
        RewardFailureError.
        """
        try:
            return self._score(videos, prompts)
        except _Fault as fault:
            _LOG.warning("%d videos have no score by %s: %s", len(prompts), self._name, fault)
            return {metric: torch.full((len(prompts),), torch.nan) for metric in self.metrics}

    def applies(self, prompt: str) -> bool:
        """Whether the server's reward judges videos of this prompt, as far as its answers have said."""
        return prompt not in self._not_for

    def describe(self) -> str:
        """Say how the server's reward scores."""
        return self._description

    def _score(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score all videos or raise; after one fault the rest is not sent, or ranks that wait would give up."""
        if isinstance(videos, Tensor):
            contents = [video.cpu().numpy().tobytes() for video in videos]
            request = ScoreRequest(prompts=list(prompts), format="raw", shape=tuple(videos.shape[1:]))
        else:
            contents = [path.read_bytes() for path in videos]
            request = ScoreRequest(prompts=list(prompts), format="mp4")
        size = len(request.model_dump_json()) + sum(len(content) + FORM_BYTES for content in contents)
        if size > self._max_body_bytes and len(prompts) > 1:
            half = len(prompts) // 2
            halves = [self._score(videos[part], prompts[part]) for part in (slice(half), slice(half, None))]
            return {metric: torch.cat([scores[metric] for scores in halves]) for metric in self.metrics}
        if size > self._max_body_bytes:
            raise RewardFailureError(
                f"reward server {self._url}: one video is {size} bytes, but it reads at most {self._max_body_bytes}. "
                "Start the server with a higher --max_body_mb."
            )
        sent = [digest(prompt, content) for prompt, content in zip(prompts, contents, strict=True)]

        def post() -> ScoreResponse:
            """Ask once, and refuse an answer that is not about exactly what was sent."""
            answer = self._answer(
                ScoreResponse,
                "POST",
                f"/score/{self._name}",
                data={"request": request.model_dump_json()},
                files=[("videos", (str(index), content)) for index, content in enumerate(contents)],
            )
            if answer.digests != sent:
                raise _Fault("an answer about other videos than were sent")
            lists = [*answer.metrics.values(), answer.applies or sent]
            if set(answer.metrics) != set(self.metrics) or any(len(values) != len(sent) for values in lists):
                raise _Fault(f"an answer without {len(sent)} scores for each of {', '.join(self.metrics)[:_SHOWN]}")
            return answer

        answer = self._persistently(post)
        self._not_for |= {p for p, applies in zip(prompts, answer.applies or sent, strict=True) if not applies}
        return {
            metric: torch.tensor([torch.nan if value is None else value for value in values])
            for metric, values in answer.metrics.items()
        }

    def _persistently(self, ask: Callable[[], _Answer]) -> _Answer:
        """Ask until there is an answer, with waits that double; a _Fault after all retries."""
        for attempt in range(self._retries + 1):
            try:
                return ask()
            except _Fault as fault:
                last = fault
                if attempt < self._retries:
                    time.sleep(_FIRST_WAIT_SECONDS * 2**attempt)
        raise _Fault(f"reward server {self._url}: {last} ({self._retries + 1} attempts)") from last

    def _answer(self, kind: type[_Answer], method: str, path: str, **content: object) -> _Answer:
        """Send one request and read its answer.

        Raises:
            _Fault: no answer, a server error, or one that is not understood.
            RewardFailureError: the server refused.
        """
        try:
            exchange = self._exchange(method, path, content)
            status, body = asyncio.run_coroutine_threadsafe(exchange, self._loop).result()
        except TimeoutError as error:
            raise _Fault(f"no whole answer within {self._timeout:g} s") from error
        except httpx.RequestError as error:  # its text may repeat what the server sent
            raise _Fault(f"no answer ({type(error).__name__}: {str(error)!r:.{_SHOWN}})") from error
        text = f"{body[:_SHOWN].decode(errors='replace')!r:.{_SHOWN}}"
        if status >= 500 or status in (408, 429):
            raise _Fault(f"status {status}")
        if status != 200:
            hint = f" (is {TOKEN_VARIABLE} that of the server?)" if status == 401 else ""
            raise RewardFailureError(f"reward server {self._url} refused with status {status}{hint}: {text}")
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise _Fault(f"an answer that is no {kind.__name__}: {text}") from error

    async def _exchange(self, method: str, path: str, content: dict[str, object]) -> tuple[int, bytes]:
        """Send a request; return the status and body of its answer, as it was sent: unpacked it might fill the memory.

        Raises:
            TimeoutError: connecting, sending and receiving, in however small pieces, take more than the timeout in all.
            _Fault: the answer is too long.
        """
        body = bytearray()
        async with asyncio.timeout(self._timeout), self._client.stream(method, path, **content) as response:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise _Fault(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        return response.status_code, bytes(body)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return a loop in a thread of its own, which can end an exchange in time whatever it waits for."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-requests", daemon=True).start()
    return loop
