"""Trackers: the same numbers, one curve over resumes, sample videos, and errors before anything starts."""

import io
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hyvideo.data.videos import write_video
from hyvideo.observability.metrics import MetricsLog
from hyvideo.observability.scored_videos import read_scored_videos
from hyvideo.observability.trackers import Trackers, check_trackers
from tests.support.rewards import moving_square
from tests.support.run_folders import HOSTILE_PROMPTS, write_scored


def trackers_of(run_dir: Path, *names: str, step: int = 1) -> Trackers:
    about = {"run_name": "first", "settings": {"learning_rate": "3e-05", "negative_prompt": "<b>|x|</b>"}}
    trackers = Trackers(names or ["tensorboard"], run_dir, **about, warn=pytest.fail)
    trackers.start(step)
    return trackers


def events_of(run_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(run_dir / "tb"), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    events.Reload()
    return events


def test_tensorboard_shows_each_step_once_after_a_resume_and_the_runs_name_and_settings(tmp_path):
    for steps, value in ((range(1, 7), 1.0), (range(4, 6), -1.0)):
        time.sleep(1 - time.time() % 1)  # TensorBoard orders files by the second in their names
        log = MetricsLog(tmp_path, trackers_of(tmp_path, step=steps[0]))
        log.truncate_after(steps[0] - 1)
        for step in steps:
            log.log(step, {"reward/mean": value * step})
        log.close()
    events = events_of(tmp_path)
    curve = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert curve == [(1, 1.0), (2, 2.0), (3, 3.0), (4, -4.0), (5, -5.0)]
    shown = [events.Tensors(f"run/{name}/text_summary")[0] for name in ("name", "settings")]
    name, settings = (text.tensor_proto.string_val[0].decode() for text in shown)
    assert name == "first" and r"3e\-05" in settings and r"\<b\>\|x\|" in settings


def test_a_single_process_of_torchrun_gets_no_process_group_from_its_trackers(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    PartialState._reset_state()
    trackers_of(tmp_path).close()
    assert not dist.is_initialized() and os.environ["LOCAL_RANK"] == "0"


def test_tensorboard_shows_videos_at_their_own_speed_and_of_a_long_one_every_second_frame(tmp_path):
    folder = write_scored(tmp_path / "samples" / "step_2", HOSTILE_PROMPTS, [0.5] * len(HOSTILE_PROMPTS))
    write_video(folder / "001.mp4", moving_square(8), fps=10)
    write_video(folder / "002.mp4", moving_square(8), fps=50)
    write_video(folder / "003.mp4", moving_square(90, width=256), fps=50)
    trackers = trackers_of(tmp_path)
    trackers.log_videos(2, read_scored_videos(folder))
    trackers.close()
    events = events_of(tmp_path)
    assert len(events.Tags()["images"]) == len(HOSTILE_PROMPTS)
    (video,) = events.Images("samples/000")
    assert video.step == 2 and video.encoded_image_string.startswith(b"GIF89a")
    assert (video.width, video.height) == (32, 32)
    shown = [events.Images(f"samples/00{number}")[0].encoded_image_string for number in (1, 2, 3)]
    images = [Image.open(io.BytesIO(gif)) for gif in shown]
    assert [(image.info["duration"], image.n_frames) for image in images] == [(100, 8), (20, 8), (40, 45)]


def test_wandb_continues_its_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = write_scored(tmp_path / "samples" / "step_1", ["a red circle"], [0.5])
    for step in (1, 2):
        trackers = trackers_of(tmp_path, "wandb")
        trackers.log_videos(step, read_scored_videos(folder))
        trackers.log(step, {"reward/mean": 1.0})
        trackers.close()
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(runs) == 2 and len({name.rpartition("-")[2] for name in runs}) == 1
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/videos/samples/*.mp4"))


class Unreachable(GeneralTracker):
    """A tracker of accelerate's kind whose service is down."""

    name, requires_logging_directory = "unreachable", False
    tracker = None

    def __init__(self, project: str) -> None:
        super().__init__()

    def start(self) -> None:
        if not os.environ.get("STARTS"):
            raise ConnectionError("no route to host")

    def store_init_configuration(self, values: dict) -> None:
        """It starts."""

    def log(self, values: dict, step: int | None = None) -> None:
        raise ConnectionError("no route to host")


def test_a_tracker_that_does_not_start_is_an_error_and_one_that_fails_later_is_left_out(tmp_path, monkeypatch):
    for name in ("wandbb", "aim"):
        with pytest.raises(ValueError, match=f"'{name}' is not installed, or not one of .*wandb, .*; install it or l"):
            check_trackers(["tensorboard", name])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "unreachable", Unreachable)
    monkeypatch.setattr("hyvideo.observability.trackers.get_available_trackers", lambda: ["unreachable", "tensorboard"])
    with pytest.raises(ValueError, match="'unreachable' does not start .ConnectionError: no route to host"):
        trackers_of(tmp_path, "unreachable")
    monkeypatch.setenv("STARTS", "1")
    warnings: list[str] = []
    trackers = Trackers(["unreachable", "tensorboard"], tmp_path, run_name="first", warn=warnings.append)
    trackers.start(1)
    log = MetricsLog(tmp_path, trackers)
    for step in (1, 2):
        log.log(step, {"lr": 1.0})
    log.close()
    assert warnings == ["tracker 'unreachable' is left out from now on: ConnectionError: no route to host"]
    assert [event.step for event in events_of(tmp_path).Scalars("lr")] == [1, 2]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_without_trackers_only_the_file_is_written(tmp_path):
    log = MetricsLog(tmp_path, Trackers([], tmp_path, run_name="first", warn=pytest.fail))
    log.log(1, {"lr": 1.0})
    log.close()
    assert sorted(os.listdir(tmp_path)) == [".lock", "metrics.jsonl"]
