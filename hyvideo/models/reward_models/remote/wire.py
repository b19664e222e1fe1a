"""The messages between a trainer and a reward server.

A request is a multipart form: the field `request` with a `ScoreRequest` as JSON, and one file `videos` per video, in
the order of the prompts. The answer repeats, for every video, the digest of what was scored: the client compares it
with what it sent, so that no score is ever taken for another video's.
"""

import hashlib
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, PositiveInt

TOKEN_VARIABLE = "REWARD_TOKEN"
"""Environment variable that holds the bearer token, on both sides."""


def checked_token(token: str | None, variable: str = TOKEN_VARIABLE) -> str | None:
    """Return a token without the line end that a mounted secret has, or None; a ValueError does not repeat it."""
    token = (token or "").strip()
    if not re.fullmatch(r"[\x20-\x7e]*", token):
        raise ValueError(f"{variable}: expected printable ASCII; one of the {len(token)} characters received is not.")
    return token or None


def _printable(text: str) -> str:
    """Return a text that a terminal shows as it is."""
    if not text.isprintable():
        raise ValueError("expected printable characters")
    return text


Name = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]
"""Of a reward or metric."""


class _Message(BaseModel, strict=True):
    """Converts nothing: text or a boolean is not accepted as a number."""


class ScoreRequest(_Message):
    """Videos to score.

    Attributes:
        prompts: one per video.
        format: `mp4`: the files are mp4; `raw`: they are uint8 frames of `shape`.
        shape: [F, H, W, 3] of every raw video.
    """

    # rewards search a prompt, some in a time that grows with the square of its length
    prompts: list[Annotated[str, Field(max_length=2**14)]] = Field(min_length=1, fail_fast=True)
    format: Literal["mp4", "raw"]
    shape: tuple[PositiveInt, PositiveInt, PositiveInt, Literal[3]] | None = None


class ScoreResponse(_Message):
    """Scores in the order of the request; null for an item that failed.

    Attributes:
        metrics: name -> one score per video.
        digests: `digest` of each video and prompt as the server received them.
        applies: whether the reward judges videos of each prompt; empty: it judges all.
    """

    metrics: dict[str, list[float | None]]
    digests: list[str]
    applies: list[bool] = []


class RewardFacts(_Message):
    """What a client needs to know of a reward: as the attributes of RewardModel. A terminal may show all of it."""

    metrics: list[Name] = Field(max_length=100)
    reads: Literal["memory", "file"]
    description: Annotated[str, Field(max_length=500), AfterValidator(_printable)]


class Metadata(_Message):
    """Rewards by name, frames per second that raw videos are taken to have, and the largest request that is read."""

    rewards: dict[Name, RewardFacts] = Field(max_length=100)
    video_fps: float
    max_body_bytes: int


def digest(prompt: str, content: bytes) -> str:
    """Identify a prompt with a video, the bytes of its file or frames."""
    words = prompt.encode()
    return hashlib.sha256(len(words).to_bytes(8) + words + content).hexdigest()
