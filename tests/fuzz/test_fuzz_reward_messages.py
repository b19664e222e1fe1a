"""Whatever a reward server answers, a score is its own, missing, or the run stops; whatever it is asked, it lives."""

import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import example, given
from hypothesis import strategies as st
from torch import uint8, zeros

from hyvideo.config.schema import RewardConfig
from hyvideo.models.reward_models.registry import RewardContext, RewardFailureError
from hyvideo.models.reward_models.remote import exchange
from hyvideo.models.reward_models.remote.client import RemoteReward
from hyvideo.models.reward_models.remote.server import create_app
from hyvideo.models.reward_models.remote.wire import digest
from hyvideo.models.reward_models.rewards import WeightedReward, get_reward_fn
from hyvideo.models.reward_models.vlm_checks import RemoteJudge
from tests.support.fuzzing import TEXTS, changed, fuzz, json_files, only_value_errors
from tests.support.reward_server import requests_limited
from tests.support.rewards import Brightness, FileBrightness, grey_videos

VIDEOS, PROMPTS = grey_videos(10, 20), ["a", "b"]
FACTS = {"metrics": ["brightness", "length"], "reads": "memory", "description": "the mean pixel"}
METADATA = {"rewards": {"brightness": FACTS}, "video_fps": 24.0, "max_body_bytes": 10**6}
DIGESTS = [digest(prompt, video.numpy().tobytes()) for prompt, video in zip(PROMPTS, VIDEOS, strict=True)]
SCORES = {"metrics": {"brightness": [10.0, None], "length": [1, 1.0]}, "digests": DIGESTS}
NAMES = ["Content-Type", "Content-Encoding", "Location", "Set-Cookie", "Content-Length"]
VALUES = ["text/plain; charset=zlib", "text/plain; charset=undefined", "gzip", "deflate", "br", "zstd", "identity", "x"]
VALUES += ["//", "http://[", "application/json", "-1", "a=b; Domain=.", ""]
HEADERS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES))
STATUSES = st.one_of(st.just(200), st.sampled_from([200, 204, 302, 304, 401, 404, 413, 422, 429, 500, 503, 599, 999]))


class Wire:
    def say(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._answer = (status, headers or {}, body)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        status, headers, body = self._answer
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(body))


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    wire.say(json.dumps(METADATA).encode())
    transport = httpx.MockTransport(wire)
    monkeypatch.setattr(exchange.httpx, "AsyncClient", partial(httpx.AsyncClient, transport=transport))
    return wire


@pytest.fixture
def reward(wire: Wire) -> WeightedReward:
    chosen = {"reward_model": "brightness", "reward_weights": {"brightness": 1.0}, "reward_max_failed": 1.0}
    with requests_limited(retries=0):
        return get_reward_fn(RewardConfig(**chosen, remote_reward_url="http://rewards"))


@fuzz(2)
@given(json_files(SCORES), STATUSES, HEADERS)
@example(json.dumps(SCORES).replace("10.0", '"10.0"').encode(), 200, {})
@example(json.dumps(SCORES).replace("10.0", "true").encode(), 200, {})
@example(b"x", 200, {"Content-Encoding": "gzip"})
@example(b"x", 404, {"Content-Type": "text/plain; charset=zlib"})
def test_any_answer_gives_its_own_scores_or_none(wire, reward, body, status, headers):
    wire.say(body, status, headers)
    try:
        scores = reward(VIDEOS, PROMPTS)
    except RewardFailureError as error:
        assert f"refused with status {status}" in str(error)
        return
    for metric, values in scores.metrics.items():
        if not values.isnan().all():
            said = json.loads(body)["metrics"][metric]
            assert all(score is None or type(score) in (int, float) for score in said), said
            expected = [math.nan if score is None or abs(score) > 3.4e38 else score for score in said]
            assert values.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-37, nan_ok=True)


class Endless(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b" " * 2**20


def test_an_answer_without_an_end_is_given_up(reward: WeightedReward, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Wire, "__call__", lambda self, request: httpx.Response(200, stream=Endless()))
    assert reward(VIDEOS, PROMPTS).total.isnan().all()


@fuzz(4)
@given(json_files(METADATA), STATUSES, HEADERS)
def test_any_introduction_gives_a_reward_or_a_value_error(wire, body, status, headers):
    wire.say(body, status, headers)
    with only_value_errors("http://rewards"):
        reward = RemoteReward(RewardContext(retries=0), "brightness", "http://rewards")
        assert all(type(metric) is str for metric in reward.metrics) and reward.reads in ("memory", "file")


TOKENS = [{"token": "Yes", "logprob": -1.0}, {"token": "no", "logprob": -0.5}]
COMPLETION = {"choices": [{"logprobs": {"content": [{"top_logprobs": TOKENS}]}}]}


@fuzz(2)
@given(json_files(COMPLETION), STATUSES, HEADERS)
@example(json.dumps(COMPLETION).replace("-1.0", "1e308").encode(), 200, {})
@example(json.dumps(COMPLETION).replace("-1.0", "NaN").encode(), 200, {})
def test_any_answer_of_a_chat_server_gives_a_probability_or_none(wire, body, status, headers):
    wire.say(json.dumps(COMPLETION).encode())
    judge = RemoteJudge("http://rewards/v1", "m", 10**6, RewardContext(retries=0))
    wire.say(body, status, headers)
    try:
        assert 0 <= judge.yes(zeros(1, 8, 8, 3, dtype=uint8), "Is it dark?") <= 1
    except exchange.Fault:
        pass
    except RewardFailureError as error:
        assert f"refused with status {status}" in str(error)


CONTENT = VIDEOS[0].numpy().tobytes()
REQUEST = {"prompts": ["a"], "format": "raw", "shape": [5, 32, 32, 3]}
FILES = st.sampled_from([None, "0"]) | TEXTS.map(lambda text: text.encode("utf-8", "replace").decode())
BODIES = st.sampled_from([CONTENT, b"", b"\0" * 5000]) | st.binary(max_size=8)
PARTS = st.lists(st.tuples(st.sampled_from(["videos", "videos", "request", "other"]), FILES, BODIES), max_size=3)


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., httpx.Response]]:
    """Ask a real server, without a socket; what it does not catch comes out here."""
    rewards = {"brightness": Brightness(), "file": FileBrightness()}
    app = create_app(rewards, max_body_bytes=10**5)
    with start_blocking_portal() as portal:  # in a thread: the browser of other tests has a loop in this one
        caller = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rewards")
        yield lambda path, **content: portal.call(partial(caller.post, path, **content))


def refused(answer: httpx.Response) -> bool:
    """Whether a request was refused for its own fault, with a reason."""
    assert answer.status_code == 200 or (answer.status_code in (400, 404, 413, 422) and answer.json()["detail"])
    return answer.status_code != 200


@fuzz(4)
@given(json_files(REQUEST), st.sampled_from(["brightness", "file"]), PARTS)
@example(json.dumps(REQUEST), "brightness", [("videos", None, CONTENT)])
@example(json.dumps(REQUEST | {"prompts": []}), "brightness", [("other", "0", b"")])
@example(json.dumps(REQUEST | {"prompts": ["“" * 2**15]}), "brightness", [("videos", None, CONTENT)])
def test_any_form_is_scored_or_refused_with_a_reason(ask: Callable, request: str | bytes, reward: str, parts: list):
    files = [(name, (file, content)) for name, file, content in parts] or [("videos", ("0", CONTENT))]
    answer = ask(f"/score/{reward}", data={"request": request}, files=files)
    if not refused(answer):
        assert answer.json()["digests"] == [digest(p, CONTENT) for p in json.loads(request)["prompts"]]


@fuzz(4)
@given(
    changed(REQUEST).map(json.dumps),
    st.sampled_from(["multipart/form-data; boundary=b", "application/x-www-form-urlencoded", "application/json", ""]),
    st.sampled_from(["", "; charset=undefined", "; charset=zlib", "; boundary=", '; boundary="', "; charset=\x00"]),
    st.binary(max_size=60),
)
def test_any_body_is_refused_with_a_reason(ask: Callable, request: str, kind: str, option: str, tail: bytes):
    form = b'--b\r\nContent-Disposition: form-data; name="request"\r\n\r\n' + request.encode() + b"\r\n" + tail
    assert refused(ask("/score/brightness", content=form, headers={"Content-Type": kind + option}))
