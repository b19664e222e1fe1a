"""The reward server and its client: scores are right, or missing, or the run stops; never another's."""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from hyvideo.config.schema import RewardConfig
from hyvideo.data.videos import write_video
from hyvideo.models.reward_models.moving_shapes import MovingShapesReward
from hyvideo.models.reward_models.registry import RewardContext, RewardFailureError, Videos
from hyvideo.models.reward_models.remote import server
from hyvideo.models.reward_models.remote.server import create_app
from hyvideo.models.reward_models.remote.wire import digest
from hyvideo.models.reward_models.rewards import WeightedReward, get_reward_fn
from scripts.serve_reward import build_app, parse_arguments, read_reward
from tests.support.reward_server import Faulty, requests_limited, server_process, serving, talking
from tests.support.rewards import Brightness, FileBrightness, grey_videos

TOKEN = "the token of the tests"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)


def remote(url: str, video_fps: float = 24, *, retries: int = 2, in_flight: int = 1, **settings: Any) -> WeightedReward:
    usual = {"reward_model": "brightness", "reward_weights": {"brightness": 1.0}, "reward_batch_size": 2}
    config = RewardConfig(remote_reward_url=url, **{**usual, "remote_reward_timeout": 60.0, **settings})
    with requests_limited(retries=retries, in_flight=in_flight):
        return get_reward_fn(config, video_fps=video_fps)


@pytest.fixture
def faulty() -> Iterator[Callable[..., Any]]:
    """Make and serve a reward server that shows the given faults, one per scoring request."""
    with contextlib.ExitStack() as served:

        def make(*faults: str, seconds: float = 0.0, **options: Any) -> Faulty:
            app = Faulty(create_app({"brightness": Brightness(seconds=seconds)}, token=TOKEN, **options), faults)
            app.url = served.enter_context(serving(app))
            return app

        yield make


VIDEOS, PROMPTS = grey_videos(10, 20, 30, 40), ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("500", "status 500"),
        ("429", "status 429"),
        ("malformed", "an answer that is no ScoreResponse"),
        ("fewer", "without 2 scores of brightness, length"),
        ("hang", "no whole answer within 2 s"),
        ("stale", "an answer about other videos than were sent"),
    ],
)
def test_what_fails_is_tried_again_and_what_keeps_failing_fails_its_own_videos_alone(faulty, fault, message, caplog):
    app = faulty("ok", "ok", fault, fault, "ok", fault, fault, fault)
    reward = remote(app.url, remote_reward_timeout=2.0 if fault == "hang" else 60.0)
    assert reward(VIDEOS, PROMPTS).total.tolist() == [10, 20, 30, 40]
    with caplog.at_level(logging.WARNING):
        total = reward(VIDEOS, PROMPTS).total
    assert total[:2].tolist() == [10, 20] and total[2:].isnan().all()
    assert "2 videos have no score by brightness" in caplog.text and "(3 attempts)" in caplog.text
    assert message in caplog.text and app.requests == 8
    assert reward(VIDEOS, PROMPTS).total.tolist() == [10, 20, 30, 40]


BRIGHTNESS = {"metrics": ["brightness", "length"], "reads": "memory", "description": "grey"}
INTRODUCTION = json.dumps({"rewards": {"brightness": BRIGHTNESS}, "video_fps": 24.0, "max_body_bytes": 2**30})
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
    assert len(asked) == 6 and caplog.text.count("no whole answer within 1 s (2 attempts)") == 3


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 400 \x1b[2J", b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK\r\nX\x1b" + b"x" * 60_000]
)
def test_a_message_repeats_little_of_what_a_server_says_and_nothing_that_a_terminal_obeys(head, caplog):
    answer = head + b"\r\nConnection: close\r\n\r\n" + b"\x1b[2J\x07\xe2\x80\xae" * 10_000  # a terminal would obey
    with talking(INTRODUCTION, lambda client: client.sendall(answer)) as url, caplog.at_level(logging.WARNING):
        try:
            remote(url, retries=0, reward_batch_size=4)(VIDEOS, PROMPTS)
            message = caplog.messages[-1]
        except RewardFailureError as error:
            message = str(error)
    assert message.isprintable() and len(message) < 600


@pytest.mark.parametrize("changed", [{"description": "\x1b[2J"}, {"metrics": ["brightness", "length", "x" * 101]}])
def test_a_server_that_introduces_itself_with_what_a_terminal_should_not_show_is_refused(changed):
    introduction = json.loads(INTRODUCTION) | {"rewards": {"brightness": BRIGHTNESS | changed}}
    with talking(json.dumps(introduction), lambda client: None) as url:
        with pytest.raises(ValueError, match="an answer that is no Metadata") as refused:
            remote(url, retries=0)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 600


def test_a_refused_request_stops_the_run_at_once_and_the_line_end_of_a_mounted_token_is_left_out(faulty, monkeypatch):
    app = faulty("401")
    monkeypatch.setenv("REWARD_TOKEN", f"{TOKEN}\n")
    reward = remote(app.url)
    with pytest.raises(RewardFailureError, match=r"status 401 \(is REWARD_TOKEN that of the server\?\)"):
        reward(VIDEOS[:2], PROMPTS[:2])
    assert app.requests == 1 and reward(VIDEOS, PROMPTS).total.tolist() == [10, 20, 30, 40]


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
        (TOKEN, {"url": "http://127.0.0.1:9"}, "url: server http://127.0.0.1:9: no answer.*3 attempts"),
        (TOKEN, {"url": "127.0.0.1:9"}, "remote_reward_url: .*127.0.0.1:9.* 'http://' or 'https://' protocol"),
        (TOKEN, {"url": "http://127.0.0.1:port"}, "remote_reward_url: 'http://127.0.0.1:port' is not an address"),
    ],
)
def test_a_server_that_is_absent_or_not_meant_is_found_before_training(faulty, monkeypatch, token, settings, message):
    monkeypatch.setenv("REWARD_TOKEN", token)
    with pytest.raises(ValueError, match=message):
        remote(**{"url": faulty().url, **settings})


@pytest.mark.parametrize(("most", "requests"), [(9.5, 1), (4.9, 2), (2.9, 4)])
def test_more_than_the_server_reads_is_sent_in_parts_of_which_one_without_an_answer_is_the_last(faulty, most, requests):
    app = faulty(*["ok"] * requests, "500", max_body_bytes=int(most * VIDEOS[0].nbytes))
    reward = remote(app.url, reward_batch_size=7, retries=0)
    assert reward(grey_videos(*range(7)), ["same"] * 7).total.tolist() == list(range(7))
    assert app.requests == requests and reward(grey_videos(*range(7)), ["same"] * 7).total.isnan().all()
    assert app.requests == requests + 1


def test_a_video_too_large_for_the_server_is_not_even_sent(faulty):
    app = faulty(max_body_bytes=1000)
    with pytest.raises(RewardFailureError, match=r"one video is \d+ bytes, but it reads at most 1000\. Start the"):
        remote(app.url)(VIDEOS, PROMPTS)
    assert app.requests == 0


def test_two_clients_at_once_get_their_own_scores(faulty):
    app = faulty("ok", "500", "malformed", "stale", "ok", "fewer", "500", "stale")
    levels = torch.arange(64).view(2, 32)
    with ThreadPoolExecutor(2) as pool:
        rewards = [remote(app.url, retries=5, in_flight=4) for _ in range(2)]
        totals = pool.map(lambda reward, own: reward(grey_videos(*own), ["same"] * 32).total, rewards, levels.tolist())
    assert torch.equal(torch.stack(list(totals)), levels.float())


def test_no_more_requests_are_in_flight_than_allowed_and_waits_between_attempts_double(faulty, monkeypatch):
    app, waits = faulty(*["500"] * 4, seconds=0.02), []
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: waits.append(seconds) or sleep(seconds))
    remote(app.url, retries=4)(VIDEOS[:2], PROMPTS[:2])
    assert [wait for wait in waits if wait in (0.01, 0.02, 0.04, 0.08)][:4] == [0.01, 0.02, 0.04, 0.08]
    remote(app.url, in_flight=3, reward_batch_size=1)(grey_videos(*range(12)), ["a"] * 12)
    assert app.most_at_once == 3


MEBIBYTE = 2**20
RAW = {"format": "raw", "shape": [5, 32, 32, 3]}
GREY = grey_videos(7)[0].numpy().tobytes()


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    rewards = {"brightness": Brightness(), "file_brightness": FileBrightness(), "moving_shapes": MovingShapesReward()}
    with serving(create_app(rewards, max_body_bytes=MEBIBYTE)) as address:
        yield address


class GatedBrightness(Brightness):
    def __init__(self) -> None:
        super().__init__()
        self.started, self.gate = threading.Event(), threading.Event()

    def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        self.started.set()
        self.gate.wait()
        return super().__call__(videos, prompts)


def ask(url: str, contents: Sequence[bytes] = (), reward="brightness", timeout=5.0, **request: Any) -> httpx.Response:
    files = [("videos", (str(index), content)) for index, content in enumerate(contents)]
    files = files or [("unused", ("0", b""))]  # a form with a field alone would not be multipart
    return httpx.post(f"{url}/score/{reward}", data={"request": json.dumps(request)}, files=files, timeout=timeout)


@pytest.mark.parametrize("reward", ["brightness", "file_brightness", "moving_shapes"])
@pytest.mark.parametrize("reward_io", ["file", "memory"])
def test_a_remote_reward_scores_as_the_same_reward_here(url, reward, reward_io):
    weights = {"MQ": 1.0, "TA": 0.5} if reward == "moving_shapes" else {"brightness": 1.0, "length": 0.5}
    config = RewardConfig(reward_model=reward, reward_weights=weights, reward_io=reward_io)
    noise = torch.randint(0, 256, (1, 5, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    videos = torch.cat([grey_videos(10, 60), noise])
    prompts = ["a green cross moves quickly up", "fail", "a red circle moves slowly to the left, naïve ☕"]
    here = get_reward_fn(config)(videos, prompts)
    config.remote_reward_url = url
    there = get_reward_fn(config)(videos, prompts)
    assert there.total.isnan().tolist() == [False, True, False]
    for name, values in (here.metrics | {"total": here.total}).items():
        received = (there.metrics | {"total": there.total})[name]
        torch.testing.assert_close(received, values, rtol=0, atol=0, equal_nan=True)


def test_a_prompt_that_the_servers_reward_cannot_judge_is_no_failure():
    class Short(Brightness):
        def applies(self, prompt: str) -> bool:
            return len(prompt) == 1

        def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
            found = super().__call__(videos, prompts)["brightness"]
            lengths = torch.tensor([len(prompt) for prompt in prompts])
            return {"brightness": found.masked_fill(lengths > 1, torch.nan), "length": found}

    with serving(create_app({"brightness": Short()})) as url:
        models = {"brightness": {"sub_reward": {"brightness": 1.0}, "url": url}}
        models["moving_shapes"] = {"sub_reward": {"MQ": 0.0}}
        reward = get_reward_fn(RewardConfig(reward_config={"models": models}))
        scores = reward(grey_videos(7, 8, 9), ["a", "bb", "c"])
        assert scores.applies["brightness"].tolist() == [True, False, True]
        assert scores.total.isnan().tolist() == [False, True, False] and not scores.failed().any()


def test_health_metadata_and_an_answer_that_names_what_was_scored(url):
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    metadata = httpx.get(f"{url}/metadata").json()
    assert metadata["video_fps"] == 24 and metadata["max_body_bytes"] == MEBIBYTE
    assert metadata["rewards"]["file_brightness"]["metrics"] == ["brightness", "length"]
    assert metadata["rewards"]["file_brightness"]["reads"] == "file"
    answer = ask(url, [GREY], prompts=["a"], **RAW).json()
    scored = {"metrics": {"brightness": [7.0], "length": [1.0]}, "digests": [digest("a", GREY)]}
    assert answer == scored | {"applies": [True]} and digest("a", b"bc") != digest("ab", b"c")


@pytest.mark.parametrize("shown", [None, "Bearer", "Bearer wrong", "secret", "Bearer secret2", "Bearer sécret"])
def test_without_the_token_there_is_health_alone(shown):
    with serving(create_app({"brightness": Brightness()}, token="secret")) as url:
        headers = {} if shown is None else {"Authorization": shown.encode()}
        assert httpx.get(f"{url}/health", headers=headers).status_code == 200
        assert httpx.get(f"{url}/metadata", headers=headers).status_code == 401
        assert httpx.post(f"{url}/score/brightness", headers=headers).status_code == 401
        assert httpx.get(f"{url}/metadata", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_request_that_makes_no_sense_is_refused(url):
    for request_fields, status, message in (
        ({"prompts": ["a"], **RAW}, 422, "raw videos need their shape [F, H, W, 3] and as many bytes"),
        ({"prompts": ["a"], "format": "raw"}, 422, "raw videos need their shape"),
        ({"prompts": ["a"], "format": "raw", "shape": [0, 0, 0, 3]}, 422, "greater than 0"),
        ({"prompts": ["a"], "format": "raw", "shape": [5, 32, 32, 4]}, 422, "Input should be 3"),
        ({"prompts": ["a", "b"], **RAW}, 422, "received 1 videos but 2 prompts"),
        ({"prompts": ["a"], "format": "avi"}, 422, "Input should be 'mp4' or 'raw'"),
        ({"prompts": ["a"], "format": "mp4"}, 422, "cannot be decoded as a video"),
        ({}, 422, "Field required"),
        ({"reward": "darkness", "prompts": ["a"], **RAW}, 404, "expected one of brightness, file_brightness"),
    ):
        answer = ask(url, [b"x"], **request_fields)
        assert answer.status_code == status and message in answer.json()["detail"]


def test_after_a_body_that_is_no_form_or_an_error_of_the_reward_the_next_request_is_served(url, monkeypatch):
    assert httpx.post(f"{url}/score/brightness", content=b"{}").status_code == 422
    assert ask(url, [GREY], prompts=["raise"], **RAW).status_code == 500
    assert ask(url, [GREY], prompts=["a"], **RAW).status_code == 200
    monkeypatch.setattr(Brightness, "__call__", lambda self, videos, prompts: {"brightness": torch.ones(3)})
    answer = ask(url, [GREY], prompts=["a"], **RAW)
    assert answer.status_code == 422 and "brightness must give brightness, length as [1]" in answer.json()["detail"]


def test_who_waits_takes_no_worker_thread_and_who_has_gone_is_not_scored():
    reward = GatedBrightness()
    app = Faulty(create_app({"brightness": reward}))
    with serving(app) as url, ThreadPoolExecutor(50) as clients:

        def ask_once(seconds: float | None) -> httpx.Response:
            return ask(url, [GREY], prompts=["a"], timeout=seconds, **RAW)

        try:
            patient = clients.submit(ask_once, None)
            reward.started.wait()
            gone = [clients.submit(ask_once, 2.0) for _ in range(45)]  # more than a pool has threads
            while app.requests < 46:
                time.sleep(0.01)
            assert httpx.get(f"{url}/metadata").status_code == 200
            assert all(isinstance(each.exception(), httpx.ReadTimeout) for each in gone)
        finally:
            reward.gate.set()
        assert patient.result().status_code == 200 and ask_once(None).status_code == 200
        assert len(reward.calls) == 2


def test_a_body_of_100_megabytes_is_refused_and_the_next_request_is_served(url):
    def body():
        yield b'--b\r\nContent-Disposition: form-data; name="videos"; filename="0"\r\n\r\n'
        yield from [bytes(MEBIBYTE)] * 100

    form = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = httpx.post(f"{url}/score/brightness", content=body(), headers=form)
    assert answer.status_code == 413 and f"larger than {MEBIBYTE} bytes" in answer.text
    assert ask(url, [GREY], prompts=["a"], **RAW).status_code == 200


def test_a_body_that_drips_is_given_up(monkeypatch):
    monkeypatch.setattr(server, "BODY_SECONDS", 0.5)
    with serving(create_app({"brightness": Brightness()})) as url:
        with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port), timeout=5) as connection:
            connection.sendall(
                b"POST /score/brightness HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n"
                b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
            )
            began = time.monotonic()
            assert connection.recv(2**16).startswith(b"HTTP/1.1 408") and time.monotonic() - began < 2
        assert ask(url, [GREY], prompts=["a"], **RAW).status_code == 200


def peak(process: int) -> float:
    """Most memory that a process has held, in MiB."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def black(path: Path, num_frames: int) -> bytes:
    """A video of 512x512 pixels: a few kB that are 0.75 MiB per frame when decoded."""
    write_video(path, torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(num_frames, 512, 512, 3), 24)
    return path.read_bytes()


def test_memory_is_bounded_over_the_videos_of_a_request_and_over_requests(tmp_path):
    bomb, large = black(tmp_path / "bomb.mp4", 600), black(tmp_path / "large.mp4", 120)
    half = black(tmp_path / "half.mp4", 80)

    def send(contents: Sequence[bytes]) -> httpx.Response:
        return ask(url, contents, "corner", timeout=60, prompts=["a"] * len(contents), format="mp4")

    with server_process(0.3, reward="Corner", max_body_bytes=100 * MEBIBYTE) as (url, process):
        send([large]).raise_for_status()
        before = peak(process.pid)
        for too_large in ([bomb], [half, half], [bomb] * 10):
            answer = send(too_large)
            assert answer.status_code == 413, (len(too_large), answer.text)
            assert "start the server with a higher --max_body_mb" in answer.text
        with ThreadPoolExecutor(8) as clients:
            assert {answer.status_code for answer in clients.map(send, [[large]] * 8)} == {200}
        grown = peak(process.pid) - before
    assert grown < 200, f"{grown:.0f} MiB for requests of at most 100 MiB of frames"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--reward", "movingshapes"], "no reward named 'movingshapes'.*Nearest: moving_shapes"),
        (["--reward", "brightness={"], "--reward brightness: expected its options as JSON, received '{'"),
        (["--reward", "brightness=[1]"], r"--reward brightness: expected .* JSON object .* received '\[1\]'"),
        (["--reward", 'brightness={"size": 1}'], "unexpected keyword argument 'size'.*; it takes seconds"),
        (["--reward", "brightness", "--host", "0.0.0.0"], "--host 0.0.0.0 is open to others: set REWARD_TOKEN"),
        (["--reward", "brightness", "--reward", 'brightness={"seconds": 1}'], "has each reward once; received bright"),
        (["--reward", 'clip_score={"checkpoint": 5}'], "clip_score cannot use its options {'checkpoint': 5}"),
        *((["--reward", f"brightness={text * 10**5}"], "expected its options as JSON") for text in ("[", "9")),
    ],
)
def test_a_server_that_cannot_or_should_not_run_says_so(argv, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_app(parse_arguments(argv), None)
    assert len(str(caught.value)) < 1000


def test_the_servers_command_line_makes_it():
    argv = ["--reward", "moving_shapes", "--reward", 'brightness={"seconds": 0.5}', "--host", "0.0.0.0"]
    app = build_app(parse_arguments([*argv, "--max_body_mb", "3"]), "secret\n")
    with serving(app) as url:
        metadata = httpx.get(f"{url}/metadata", headers={"Authorization": "Bearer secret"}).json()
    assert list(metadata["rewards"]) == ["moving_shapes", "brightness"]
    assert metadata["max_body_bytes"] == 3 * MEBIBYTE
    assert read_reward('brightness={"seconds": 0.5}', RewardContext())[1]._seconds == 0.5
