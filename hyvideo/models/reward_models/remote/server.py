"""The reward server: any registered reward behind HTTP, for many trainers at once."""

import asyncio
import hmac
import math
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import torch
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from hyvideo.data.videos import read_video
from hyvideo.models.reward_models.registry import RewardModel, Videos, checked_scores
from hyvideo.models.reward_models.remote.wire import Metadata, RewardFacts, ScoreRequest, ScoreResponse, digest


def create_app(
    rewards: Mapping[str, RewardModel],
    *,
    token: str | None = None,
    video_fps: float = 24,
    max_body_bytes: int = 256 * 2**20,
    video_folder: Path | None = None,
) -> FastAPI:
    """Make the application.

    `GET /health` answers anyone. `GET /metadata` and `POST /score/{reward}` require the bearer token. A reward scores
    one request at a time; others wait, and are not scored if their client has given up meanwhile.

    Args:
        rewards: by the names they are served under.
        token: what clients must show; None lets anyone in.
        video_fps: frames per second of raw videos.
        max_body_bytes: larger requests are refused.
        video_folder: where requests may name videos, instead of sending them; None: nowhere.
    """
    app = FastAPI(title="SAGE-GRPO reward server", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_BodyLimit, max_bytes=max_body_bytes)
    locks = {name: asyncio.Lock() for name in rewards}  # who waits for one takes no worker thread
    facts = {
        name: RewardFacts(metrics=list(reward.metrics), reads=reward.reads, description=reward.describe())
        for name, reward in rewards.items()
    }

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Say that the server is up."""
        return {"status": "ok"}

    @app.get("/metadata", dependencies=[Depends(_guard(token))])
    async def metadata() -> Metadata:
        """Say what is served."""
        return Metadata(rewards=facts, video_fps=video_fps, max_body_bytes=max_body_bytes)

    @app.post("/score/{name}", dependencies=[Depends(_guard(token))])
    async def score(name: str, request: Request) -> ScoreResponse:
        """Score the videos of one request."""
        if name not in rewards:
            raise HTTPException(404, f"no reward '{name}'; expected one of {', '.join(rewards)}")
        asked, contents = await _read_form(request)
        reward = rewards[name]
        with tempfile.TemporaryDirectory(prefix="reward-server-") as folder:
            try:
                videos = await run_in_threadpool(_unpacked, reward, asked, contents, Path(folder), video_folder)
                async with locks[name]:
                    if await request.is_disconnected():
                        raise HTTPException(499, "the client has gone")
                    scores = await run_in_threadpool(reward, videos, asked.prompts)
                return await run_in_threadpool(_response, name, reward, asked, contents, scores)
            except ValueError as error:
                raise HTTPException(422, str(error)) from error

    return app


def _guard(token: str | None) -> Callable[[Request], Awaitable[None]]:
    """Return the check that a request shows the token."""

    async def check(request: Request) -> None:
        """Answer 401 to a request without the token."""
        shown = request.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "expected the header Authorization: Bearer TOKEN with the server's token")

    return check


async def _read_form(request: Request) -> tuple[ScoreRequest, list[bytes]]:
    """Read and check the form: as many videos as prompts."""
    try:
        async with request.form(max_part_size=2**24) as form:
            asked = ScoreRequest.model_validate_json(str(form.get("request")))
            uploads = form.getlist("videos")
            if asked.format == "path":
                contents = [path.encode() for path in asked.paths]
            elif all(isinstance(upload, UploadFile) for upload in uploads):
                contents = [await upload.read() for upload in uploads]
            else:
                raise HTTPException(422, "field `videos`: expected files, received text")
    except ValueError as error:  # of the field `request`, or of a form in no charset
        raise HTTPException(422, f"the form: {error}") from error
    if len(contents) != len(asked.prompts):
        raise HTTPException(422, f"received {len(contents)} videos but {len(asked.prompts)} prompts")
    return asked, contents


def _response(
    name: str, reward: RewardModel, asked: ScoreRequest, contents: Sequence[bytes], scores: Mapping[str, Tensor]
) -> ScoreResponse:
    """Return the scores of one request, with what each is the score of.

    Raises:
        ValueError: the reward gave other metrics or shapes than it declares.
    """
    digests = [digest(prompt, content) for prompt, content in zip(asked.prompts, contents, strict=True)]
    metrics = {
        metric: [value if math.isfinite(value) else None for value in values.tolist()]
        for metric, values in checked_scores(name, reward, scores, len(contents)).items()
    }
    return ScoreResponse(metrics=metrics, digests=digests)


def _unpacked(
    reward: RewardModel, asked: ScoreRequest, contents: Sequence[bytes], folder: Path, video_folder: Path | None
) -> Videos:
    """Return videos as the reward reads them.

    Raises:
        ValueError: a video is not what the request says, or a path leads out of the folder.
    """
    if asked.format == "raw":
        return _frames(asked.shape, contents)
    if asked.format == "path":
        paths = [_inside(video_folder, name) for name in asked.paths]
    else:
        paths = [folder / f"{index}.mp4" for index in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
    if reward.reads == "file":
        return paths
    videos = [read_video(path) for path in paths]
    if len(shapes := {tuple(video.shape) for video in videos}) > 1:
        raise ValueError(f"the videos of one request must have one shape, received {sorted(shapes)}")
    return torch.stack(videos)


def _frames(shape: tuple[int, ...] | None, contents: Sequence[bytes]) -> Tensor:
    """Return raw videos as uint8 `[B, F, H, W, 3]`."""
    if shape is None or min(shape) < 1:
        raise ValueError(f"raw videos need their shape [F, H, W, 3], received {shape}")
    for content in contents:
        if len(content) != math.prod(shape):
            raise ValueError(f"a raw video of shape {shape} has {math.prod(shape)} bytes, received {len(content)}")
    return torch.stack([torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape) for content in contents])


def _inside(folder: Path | None, name: str) -> Path:
    """Return the path of a video in the server's folder; links that lead out of it count as outside."""
    if folder is None:
        raise ValueError("this server takes no paths (--video_folder): send the videos")
    try:
        path = (folder / name).resolve()
        if path.is_relative_to(folder.resolve()) and path.is_file():
            return path
    except (OSError, RuntimeError, ValueError):  # no name that a file can have, or a link that leads to itself
        pass
    raise ValueError(f"there is no video {name!r} in the server's folder")


class _BodyLimit:
    """Answers 413 to a request that turns out to be too large, without storing it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting what it sends."""
        received = 0

        async def counted() -> Message:
            """Receive the next piece; answer 413 when they have become too many bytes."""
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, f"the request is larger than {self._max_bytes} bytes")
            return message

        await self._app(scope, counted, send)
