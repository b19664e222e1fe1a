"""A reward server that fails in every way it can: scores are right, or missing, or the run stops; never another's."""

import json
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hyvideo.config.schema import RewardConfig
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.models.reward_models.remote import exchange
from hyvideo.models.reward_models.remote.server import create_app
from hyvideo.models.reward_models.rewards import WeightedReward, get_reward_fn
from tests.support.reward_server import Faulty, requests_limited, server_process, serving, talking
from tests.support.rewards import Brightness, grey_videos

TOKEN = "the token of the tests"


@pytest.fixture(autouse=True)
def quick_and_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)


def remote(url: str, video_fps: float = 24, *, retries: int = 2, in_flight: int = 1, **settings: Any) -> WeightedReward:
    usual = {"reward_model": "brightness", "reward_weights": {"brightness": 1.0}, "reward_batch_size": 2}
    config = RewardConfig(remote_reward_url=url, **{**usual, "remote_reward_timeout": 60.0, **settings})
    with requests_limited(retries=retries, in_flight=in_flight):
        return get_reward_fn(config, video_fps=video_fps)


@pytest.fixture
def faulty() -> Callable[..., Any]:
    """Make a server that shows the given faults, one per scoring request."""

    def make(*faults: str, seconds: float = 0.0, **options: Any) -> Faulty:
        return Faulty(create_app({"brightness": Brightness(seconds=seconds)}, token=TOKEN, **options), faults)

    return make


VIDEOS, PROMPTS = grey_videos(10, 20, 30, 40), ["a", "b", "c", "d"]


@pytest.mark.parametrize("fault", ["500", "429", "malformed", "fewer", "hang"])
def test_what_fails_for_a_while_is_tried_again(faulty, fault):
    app = faulty(fault, fault)
    with serving(app) as url:
        reward = remote(url, remote_reward_timeout=2.0 if fault == "hang" else 60.0)
        assert reward(VIDEOS, PROMPTS).total.tolist() == [10, 20, 30, 40]
    assert app.requests == 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("500", "status 500"),
        ("malformed", "an answer that is no ScoreResponse"),
        ("fewer", "an answer without 2 scores for each of brightness, length"),
        ("hang", "no whole answer within 2 s"),
        ("stale", "an answer about other videos than were sent"),
    ],
)
def test_what_keeps_failing_fails_its_own_videos_alone(faulty, fault, message, caplog):
    with serving(faulty("ok", fault, fault)) as url, caplog.at_level(logging.WARNING):
        reward = remote(url, retries=1, remote_reward_timeout=2.0 if fault == "hang" else 60.0)
        total = reward(VIDEOS, PROMPTS).total
        assert total[:2].tolist() == [10, 20] and total[2:].isnan().all()
        assert "2 videos have no score by brightness" in caplog.text and "(2 attempts)" in caplog.text
        assert message in caplog.text
        assert reward(VIDEOS, PROMPTS).total.tolist() == [10, 20, 30, 40]


def test_a_server_killed_while_it_scores_fails_what_it_had_and_nothing_before(caplog):
    with server_process(seconds=0.3) as (url, process), caplog.at_level(logging.WARNING):
        reward = remote(url)
        scoring = reward.begin()
        scoring.add(VIDEOS, PROMPTS)
        scoring._results[0][0].result()  # the first two videos are done; the others take 0.6 s
        time.sleep(0.3)
        process.kill()
        total = reward.finish(scoring).total
    assert total[:2].tolist() == [10, 20] and total[2:].isnan().all()
    assert "2 videos have no score" in caplog.text


INTRODUCTION = json.dumps(
    {
        "rewards": {"brightness": {"metrics": ["brightness", "length"], "reads": "memory", "description": "grey"}},
        "video_fps": 24.0,
        "max_body_bytes": 2**30,
    }
)


HEAD = b"HTTP/1.1 200 OK\r\nX: "


@pytest.mark.parametrize(
    ("first", "pieces", "pause", "size"),
    [
        pytest.param(b"", [HEAD[i : i + 1] or b"x" for i in range(40)], 0.1, 32, id="dripping head"),
        pytest.param(HEAD + b"\r\nContent-Length: 9999\r\n\r\n", [b" "] * 40, 0.1, 32, id="dripping body"),
        pytest.param(b"", [b"HTTP/1.1 100 Continue\r\n\r\n" * 10] * 400, 0.01, 32, id="asking for more"),
        pytest.param(b"", [b""], 4, 256, id="reading nothing"),
    ],
)
def test_one_timeout_covers_a_whole_exchange_and_what_exceeds_it_is_tried_again(first, pieces, pause, size, caplog):
    asked = []

    def behave(client: socket.socket) -> None:
        asked.append(client)
        client.sendall(first)
        for piece in pieces:
            client.sendall(piece)
            time.sleep(pause)

    with talking(INTRODUCTION, behave) as url:
        reward = remote(url, remote_reward_timeout=1.0, retries=1, in_flight=3)
        videos = torch.zeros(6, 20, size, size, 3, dtype=torch.uint8)  # the large ones are more than sockets hold
        began = time.monotonic()
        with caplog.at_level(logging.WARNING):
            assert reward(videos, ["a"] * 6).total.isnan().all()
        assert 2 <= time.monotonic() - began < 4
    assert len(asked) == 6
    assert caplog.text.count("no whole answer within 1 s (2 attempts)") == 3


def answer(client: socket.socket, head: bytes) -> None:
    """Answer with what a terminal would obey, much of it."""
    client.sendall(head + b"\r\nConnection: close\r\n\r\n" + b"\x1b[2J\x07\xe2\x80\xae" * 10_000)


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 400 \x1b[2J", b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK\r\nX\x1b" + b"x" * 60_000]
)
def test_a_message_repeats_little_of_what_a_server_says_and_nothing_that_a_terminal_obeys(head, caplog):
    with talking(INTRODUCTION, lambda client: answer(client, head)) as url, caplog.at_level(logging.WARNING):
        try:
            remote(url, retries=0, reward_batch_size=4)(VIDEOS, PROMPTS)
            message = caplog.messages[-1]
        except RewardFailureError as error:
            message = str(error)
    assert message.isprintable() and len(message) < 600


@pytest.mark.parametrize("changed", [{"description": "\x1b[2J"}, {"metrics": ["brightness", "length", "x" * 101]}])
def test_a_server_that_introduces_itself_with_what_a_terminal_should_not_show_is_refused(changed):
    introduction = json.loads(INTRODUCTION)
    introduction["rewards"]["brightness"] |= changed
    with talking(json.dumps(introduction), lambda client: None) as url:
        with pytest.raises(ValueError, match="an answer that is no Metadata") as refused:
            remote(url, retries=0)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 600


def test_a_refused_request_stops_the_run_at_once_and_the_line_end_of_a_mounted_token_is_left_out(faulty, monkeypatch):
    app = faulty("401")
    monkeypatch.setenv("REWARD_TOKEN", f"{TOKEN}\n")
    with serving(app) as url:
        reward = remote(url)
        with pytest.raises(RewardFailureError, match=r"status 401 \(is REWARD_TOKEN that of the server\?\)"):
            reward(VIDEOS[:2], PROMPTS[:2])
        assert app.requests == 1
        assert reward(VIDEOS, PROMPTS).total.tolist() == [10, 20, 30, 40]


NO_HEADER = "^REWARD_TOKEN: expected printable((?!secret).)*$"


@pytest.mark.parametrize(
    ("token", "settings", "message"),
    [
        ("another", {}, "refused with status 401.*REWARD_TOKEN"),
        ("", {}, "refused with status 401.*REWARD_TOKEN"),
        ("top\nsecret", {}, NO_HEADER),
        ("\udce9secret", {}, NO_HEADER),
        (TOKEN, {"reward_model": "darkness"}, "has no reward 'darkness'; it has brightness"),
        (TOKEN, {"reward_weights": {"contrast": 1.0}}, "brightness has no metric contrast; expected some of bright"),
        (TOKEN, {"video_fps": 16}, "video_fps is 16, but .* 24.0: start it with --video_fps 16"),
        (TOKEN, {"url": "http://127.0.0.1:9"}, "url: reward server http://127.0.0.1:9: no answer.*3 attempts"),
        (TOKEN, {"url": "http://127.0.0.1:port"}, "remote_reward_url: 'http://127.0.0.1:port' is not an address"),
    ],
)
def test_a_server_that_is_not_there_or_not_meant_is_found_before_training(
    faulty, monkeypatch, token, settings, message
):
    monkeypatch.setenv("REWARD_TOKEN", token)
    with serving(faulty()) as url, pytest.raises(ValueError, match=message):
        remote(**{"url": url, **settings})


@pytest.mark.parametrize(("most", "requests"), [(9.5, 1), (4.9, 2), (2.9, 4)])
def test_more_than_the_server_reads_is_sent_in_parts_of_which_one_without_an_answer_is_the_last(faulty, most, requests):
    app = faulty(*["ok"] * requests, "500", max_body_bytes=int(most * VIDEOS[0].nbytes))
    with serving(app) as url:
        reward = remote(url, reward_batch_size=7, retries=0)
        assert reward(grey_videos(*range(7)), ["same"] * 7).total.tolist() == list(range(7))
        assert app.requests == requests
        assert reward(grey_videos(*range(7)), ["same"] * 7).total.isnan().all()
    assert app.requests == requests + 1


def test_a_video_too_large_for_the_server_is_not_even_sent(faulty):
    app = faulty(max_body_bytes=1000)
    with serving(app) as url:
        with pytest.raises(RewardFailureError, match=r"one video is \d+ bytes, but it reads at most 1000\. Start the"):
            remote(url)(VIDEOS, PROMPTS)
    assert app.requests == 0


def test_two_clients_at_once_get_their_own_scores(faulty):
    app = faulty("ok", "500", "malformed", "stale", "ok", "fewer", "500", "stale")
    levels = torch.arange(64).view(2, 32)
    with serving(app) as url, ThreadPoolExecutor(2) as pool:
        rewards = [remote(url, retries=5, in_flight=4) for _ in range(2)]
        totals = pool.map(lambda reward, own: reward(grey_videos(*own), ["same"] * 32).total, rewards, levels.tolist())
    assert torch.equal(torch.stack(list(totals)), levels.float())


def test_no_more_requests_are_in_flight_than_allowed_and_waits_between_attempts_double(faulty, monkeypatch):
    app, waits = faulty(*["500"] * 4, seconds=0.02), []
    with serving(app) as url:
        monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: waits.append(seconds) or sleep(seconds))
        remote(url, retries=4)(VIDEOS[:2], PROMPTS[:2])
        assert [wait for wait in waits if wait in (0.01, 0.02, 0.04, 0.08)][:4] == [0.01, 0.02, 0.04, 0.08]
        reward = remote(url, in_flight=3, reward_batch_size=1)
        reward(grey_videos(*range(12)), ["a"] * 12)
    assert app.most_at_once == 3
