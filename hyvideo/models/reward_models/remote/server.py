"""The reward server: any registered reward behind HTTP, for many trainers at once."""

import asyncio
import hmac
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect
from torch import Tensor

from hyvideo.data.videos import VideoTooLargeError, read_video
from hyvideo.models.reward_models.registry import RewardModel, Videos, checked_answer
from hyvideo.models.reward_models.remote.wire import Metadata, RewardFacts, ScoreRequest, ScoreResponse, digest

BODY_SECONDS = 300.0
"""Time in which the body of a request must come; after as many a trainer gives up by default."""

_REQUESTS_HELD = 2  # of each reward: one that is scored, and the next one that is read and decoded meanwhile


def create_app(
    rewards: Mapping[str, RewardModel],
    *,
    token: str | None = None,
    video_fps: float = 24,
    max_body_bytes: int = 256 * 2**20,
) -> FastAPI:
    """Make the application, which serves rewards by name to whoever shows the token; None lets anyone in.

    `GET /health` answers anyone. `GET /metadata` and `POST /score/{reward}` require the bearer token. A reward scores
    one request at a time, while one more is read and decoded. The bodies of others wait with their clients; those that
    have given up meanwhile are not scored. Raw videos have `video_fps` frames per second. Requests of more than
    `max_body_bytes` are refused, and files with more bytes of frames for a reward that reads frames.
    """
    app = FastAPI(title="SAGE-GRPO reward server", docs_url=None, redoc_url=None, openapi_url=None)
    held = {name: asyncio.Semaphore(_REQUESTS_HELD) for name in rewards}  # who waits takes no worker thread
    locks = {name: asyncio.Lock() for name in rewards}
    facts = {
        name: RewardFacts(metrics=list(reward.metrics), reads=reward.reads, description=reward.describe())
        for name, reward in rewards.items()
    }

    async def guard(request: Request) -> None:
        """Answer 401 to a request without the token."""
        shown = request.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "expected the header Authorization: Bearer TOKEN with the server's token")

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answer anyone."""
        return {"status": "ok"}

    @app.get("/metadata", dependencies=[Depends(guard)])
    async def metadata() -> Metadata:
        """Say what is served."""
        return Metadata(rewards=facts, video_fps=video_fps, max_body_bytes=max_body_bytes)

    @app.post("/score/{name}", dependencies=[Depends(guard)])
    async def score(name: str, request: Request) -> ScoreResponse:
        """Score the videos of one request."""
        if name not in rewards:
            raise HTTPException(404, f"no reward '{name}'; expected one of {', '.join(rewards)}")
        length = request.headers.get("Content-Length", "")  # uvicorn reads no more than this
        if not length.isdecimal() or int(length) > max_body_bytes:
            raise HTTPException(413, f"the request is larger than {max_body_bytes} bytes, or does not say its length")
        async with held[name]:
            with tempfile.TemporaryDirectory(prefix="reward-server-") as folder:
                try:
                    asked, digests, videos = await run_in_threadpool(
                        _unpacked, rewards[name], await _read_form(request), Path(folder), max_body_bytes
                    )
                    async with locks[name]:
                        if await request.is_disconnected():
                            raise ClientDisconnect
                        found = await run_in_threadpool(checked_answer, name, rewards[name], videos, asked.prompts)
                except VideoTooLargeError as error:
                    hint = "Or send fewer, or start the server with a higher --max_body_mb."
                    raise HTTPException(413, f"{error} {hint}") from error.with_traceback(None)  # holds the frames
                except ValueError as error:
                    raise HTTPException(422, str(error)) from error
                except ClientDisconnect as error:
                    raise HTTPException(499, "the client has gone") from error
        metrics = {key: [v if math.isfinite(v) else None for v in values.tolist()] for key, values in found.items()}
        applies = [*map(rewards[name].applies, asked.prompts)]
        return ScoreResponse(metrics=metrics, digests=digests, applies=applies)

    return app


async def _read_form(request: Request) -> tuple[ScoreRequest, list[bytes]]:
    """Read and check the form: as many videos as prompts."""
    try:
        async with asyncio.timeout(BODY_SECONDS), request.form(max_part_size=2**24) as form:
            asked = ScoreRequest.model_validate_json(str(form.get("request")))
            contents = [await part.read() for part in form.getlist("videos") if isinstance(part, UploadFile)]
    except TimeoutError as error:
        raise HTTPException(408, f"the request did not end within {BODY_SECONDS:g} s") from error
    except ValueError as error:  # of the field `request`, or of a form in no charset
        raise HTTPException(422, f"the form: {error}") from error
    if len(contents) != len(asked.prompts):
        raise HTTPException(422, f"received {len(contents)} videos but {len(asked.prompts)} prompts")
    return asked, contents


def _unpacked(
    reward: RewardModel, form: tuple[ScoreRequest, Sequence[bytes]], folder: Path, most: int
) -> tuple[ScoreRequest, list[str], Videos]:
    """Return what is asked, the digests, and the videos as the reward reads them, `most` bytes of frames at most.

    A ValueError says that a video is not what the request says or too large.
    """
    asked, contents = form
    digests = [digest(prompt, content) for prompt, content in zip(asked.prompts, contents, strict=True)]
    if asked.format == "raw":
        if asked.shape is None or any(len(content) != math.prod(asked.shape) for content in contents):
            raise ValueError(f"raw videos need their shape [F, H, W, 3] and as many bytes, received {asked.shape}")
        frames = [np.frombuffer(content, np.uint8).reshape(asked.shape) for content in contents]
        return asked, digests, torch.from_numpy(np.stack(frames))
    paths = [folder / f"{index}.mp4" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return asked, digests, paths if reward.reads == "file" else _decoded(paths, most)


def _decoded(paths: Sequence[Path], most: int) -> Tensor:
    """Return the frames of files, `most` bytes at most: uint8 `[B, F, H, W, 3]`. They are never held twice."""
    first = read_video(paths[0], max_bytes=most // len(paths))
    if len(paths) == 1:
        return first[None]
    videos = first.new_empty(len(paths), *first.shape)
    videos[0] = first
    for index, path in enumerate(paths[1:], start=1):
        frames = read_video(path, max_bytes=most // len(paths))
        if frames.shape != videos.shape[1:]:
            shapes = f"{list(videos.shape[1:])} and {list(frames.shape)}"
            raise ValueError(f"the videos of one request must have one shape, received {shapes}")
        videos[index] = frames
    return videos
