"""A reward that a server computes. Temporary failures are retried; a refusal stops the run."""

import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from hyvideo.config.outside import as_value_error
from hyvideo.models.reward_models.registry import RewardContext, RewardFailureError, RewardModel, Videos
from hyvideo.models.reward_models.remote.exchange import SHOWN, Exchange, Fault
from hyvideo.models.reward_models.remote.wire import (
    TOKEN_VARIABLE,
    Metadata,
    ScoreRequest,
    ScoreResponse,
    checked_token,
    digest,
)

FORM_BYTES = 512
"""Allowance for what a form adds to each video."""

_LOG = logging.getLogger(__name__)


class RemoteReward(RewardModel):
    """A reward of a server, called as if it were here; many threads may call it at once.

    A ValueError if the token is no header, or the server does not answer, refuses the token, does not have this reward
    or takes raw videos to have another frame rate than the run's.
    """

    def __init__(self, context: RewardContext, name: str, url: str) -> None:
        super().__init__(context)
        self._name, self._url = name, url
        token = checked_token(os.environ.get(TOKEN_VARIABLE))
        self._server = Exchange(url, token, context, setting="remote_reward_url", variable=TOKEN_VARIABLE)
        with as_value_error("remote_reward_url", Fault, RewardFailureError):
            metadata = self._server.ask(Metadata, "GET", "/metadata")
        if name not in metadata.rewards:
            raise ValueError(
                f"the reward server {url} has no reward '{name}'; it has {', '.join(metadata.rewards)[:SHOWN]}."
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
        except Fault as fault:
            _LOG.warning("%d videos have no score by %s: %s", len(prompts), self._name, fault)
            return {metric: torch.full((len(prompts),), torch.nan) for metric in self.metrics}

    def applies(self, prompt: str) -> bool:
        """Whether the server's reward judges videos of this prompt, as far as its answers have said."""
        return prompt not in self._not_for

    def describe(self) -> str:
        """Say how the server's reward scores."""
        return self._description

    def _score(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score all videos or raise: after a fault the rest could take longer than the other ranks wait."""
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

        def check(answer: ScoreResponse) -> None:
            """Refuse an answer that is not about exactly what was sent."""
            lists, names = [*answer.metrics.values(), answer.applies or sent], ", ".join(self.metrics)[:SHOWN]
            given = set(answer.metrics) == set(self.metrics) and all(len(values) == len(sent) for values in lists)
            if answer.digests != sent or not given:
                raise Fault(f"an answer about other videos than were sent, or without {len(sent)} scores of {names}")

        answer = self._server.ask(
            ScoreResponse,
            "POST",
            f"/score/{self._name}",
            check,
            data={"request": request.model_dump_json()},
            files=[("videos", (str(index), content)) for index, content in enumerate(contents)],
        )
        self._not_for |= {p for p, applies in zip(prompts, answer.applies or sent, strict=True) if not applies}
        return {
            metric: torch.tensor([torch.nan if value is None else value for value in values])
            for metric, values in answer.metrics.items()
        }
