"""A server with OpenAI's chat protocol (vLLM, SGLang and others), asked for text or its first token's odds."""

import base64
import io
import os
from typing import Annotated

from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.models.reward_models.remote.exchange import Exchange, Fault

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key that the server asks for, if it does."""

TOP = 20
"""Most likely tokens that are asked for, the most that the protocol allows."""


class _Token(BaseModel):
    token: str
    logprob: Annotated[float, Field(le=0.01)]  # some servers round above 0; what is far above overflows its exponential


class _Position(BaseModel):
    top_logprobs: list[_Token] = []


class _LogProbs(BaseModel):
    content: list[_Position] | None = None


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message = _Message()
    logprobs: _LogProbs | None = None


class Completion(BaseModel):
    """What is read of an answer."""

    choices: Annotated[list[_Choice], Field(min_length=1)]


class ChatServer:
    """A model of a chat server; many threads may ask at once.

    Args:
        url: up to and with `/v1`.
        model: the name it is served under.
        context: limits of the requests.
        setting: what names the address, for messages.

    Raises:
        ValueError: `url` is no address.
    """

    def __init__(self, url: str, model: str, context: RewardContext, setting: str) -> None:
        key = os.environ.get(KEY_VARIABLE) or None
        self.url, self.model = url, model
        self._exchange = Exchange(url, key, context, setting=setting, variable=KEY_VARIABLE)

    def reply(self, text: str) -> str:
        """Return the answer to a text.

        Raises:
            Fault: there is none, after all retries.
            RewardFailureError: the server refused.
        """
        answer = self._complete([{"type": "text", "text": text}], max_tokens=2048, temperature=0.7)
        return answer.choices[0].message.content or ""

    def first_token(self, frames: Tensor, text: str) -> dict[str, float]:
        """Return log-probabilities of the likeliest first tokens of the answer to images and a text.

        Args:
            frames: uint8 `[N, H, W, 3]`.
            text: what is asked about them.

        Raises:
            Fault: there is no answer after all retries, or one without log-probabilities.
            RewardFailureError: the server refused.
        """
        images = [{"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in frames]
        content = [*images, {"type": "text", "text": text}]
        answer = self._complete(content, max_tokens=1, temperature=0, logprobs=True, top_logprobs=TOP)
        told = answer.choices[0].logprobs
        if told is None or not told.content or not told.content[0].top_logprobs:
            raise Fault(f"server {self.url}: {self.model} answers without log-probabilities, which are needed")
        return {token.token: token.logprob for token in told.content[0].top_logprobs}

    def _complete(self, content: list[dict[str, object]], **how: object) -> Completion:
        request = {"model": self.model, "messages": [{"role": "user", "content": content}], **how}
        return self._exchange.persistently(
            lambda: self._exchange.answer(Completion, "POST", "/chat/completions", json=request)
        )


def _data_url(frame: Tensor) -> str:
    """Write a frame uint8 `[H, W, 3]` as the protocol takes images, without loss."""
    file = io.BytesIO()
    Image.fromarray(frame.cpu().numpy()).save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
