"""Experiment trackers: the run's numbers, settings and sample videos, sent where its owner looks at them.

The trackers are accelerate's. TensorBoard and wandb also get videos and continue their curves when a run resumes; the
others get numbers and settings.
"""

import io
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import patch_environment
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

from hyvideo.data.files import FULL
from hyvideo.data.videos import read_video, video_length
from hyvideo.observability.scored_videos import ScoredVideo

PROJECT = "sage-grpo"
_GIF_SIDE, _GIF_FRAMES = 256, 48


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ValueError for a tracker that does not exist or is not installed."""
    for name in names:
        if name not in [str(found) for found in get_available_trackers()]:
            known = ", ".join(map(str, LOGGER_TYPE_TO_CLASS))
            raise ValueError(f"trackers: '{name}' is not installed, or not one of {known}; install it or leave it out.")


@dataclass
class Trackers:
    """Sends what one run logs to its trackers; only rank 0 uses it.

    A tracker that fails while the run trains is dropped from then on, with a warning: its numbers are in the run
    folder too, and a service that is down must not cost a round. In the run folder TensorBoard writes to `tb/`, and
    `tracker_id` keeps the run's name at trackers over resumes.
    """

    names: Sequence[str]
    run_dir: Path
    run_name: str
    warn: Callable[[str], None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    _started: list[GeneralTracker] = field(default_factory=list, init=False)

    def start(self, step: int) -> None:
        """Start all trackers, whose next row is that of update `step`; what they knew of later ones is hidden.

        A ValueError names one that cannot start and what to do; a full disk is an OSError.
        """
        for name in dict.fromkeys(self.names):
            try:
                self._started.append(self._start(name, step))
            except Exception as error:  # whatever a service and its library may raise
                self.close()
                if isinstance(error, OSError) and error.errno in FULL:  # not the service's fault
                    raise OSError(error.errno, error.strerror, str(self.run_dir)) from error
                raise ValueError(
                    f"trackers: '{name}' does not start ({type(error).__name__}: {error}). Log in or set it up as its "
                    "own documents say (wandb: `wandb login`, or WANDB_MODE=offline), or leave it out."
                ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one update."""
        self._each(lambda tracker: tracker.log(dict(values), step=step))

    def log_videos(self, step: int, videos: Sequence[ScoredVideo]) -> None:
        """Log videos with their prompts and rewards, where the tracker shows videos."""
        captions = {f"samples/{v.path.stem}": (v.path, f"{v.prompt} ({v.reward:+.3f})") for v in videos}

        def show(tracker: GeneralTracker) -> None:
            """Show the videos, or nothing."""
            if tracker.name == "tensorboard":  # moving images are what it shows
                for tag, (path, caption) in captions.items():
                    gif, width, height = _as_gif(path)
                    image = Summary.Image(encoded_image_string=gif, width=width, height=height, colorspace=3)
                    about = SummaryMetadata(summary_description=_escaped(caption))
                    summary = Summary(value=[Summary.Value(tag=tag, image=image, metadata=about)])
                    tracker.tracker.file_writer.add_summary(summary, step)
                tracker.tracker.flush()
            elif tracker.name == "wandb":
                import wandb  # installed where it is asked for

                shown = {
                    tag: wandb.Video(str(path), caption=said, format="mp4") for tag, (path, said) in captions.items()
                }
                tracker.log(shown, step=step)

        self._each(show)

    def close(self) -> None:
        """End the trackers."""
        self._each(lambda tracker: tracker.finish())
        self._started = []

    def _each(self, action: Callable[[GeneralTracker], None]) -> None:
        """Do something with every tracker; one that fails is left out from now on."""
        for tracker in list(self._started):
            try:
                action(tracker)
            except Exception as error:  # whatever a service and its library may raise
                self._started.remove(tracker)
                self.warn(f"tracker '{tracker.name}' is left out from now on: {type(error).__name__}: {error}")

    def _start(self, name: str, step: int) -> GeneralTracker:
        with nullcontext() if dist.is_initialized() else patch_environment(local_rank=-1):
            PartialState()  # the trackers ask it who they are; for a single process of torchrun it would make a group
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        if name == "tensorboard":
            tracker = tracker_class("tb", logging_dir=str(self.run_dir), purge_step=step)
        elif name == "wandb":
            kept = self.run_dir / "tracker_id"
            if not kept.exists():
                kept.write_text(uuid.uuid4().hex[:12])
            names = {"name": self.run_name, "id": kept.read_text().strip(), "resume": "allow"}
            tracker = tracker_class(os.environ.get("WANDB_PROJECT", PROJECT), dir=str(self.run_dir), **names)
        elif tracker_class.requires_logging_directory:
            tracker = tracker_class(PROJECT, logging_dir=str(self.run_dir))
        else:
            tracker = tracker_class(PROJECT)
        tracker.start()
        if name == "tensorboard":  # its own handling of settings makes a second run of every start
            about = {"run/name": self.run_name}
            rows = "".join(f"| {name} | {_escaped(str(value))} |\n" for name, value in self.settings.items())
            tracker.log(about | {"run/settings": f"| setting | value |\n|---|---|\n{rows}"}, step=step)
        else:
            tracker.store_init_configuration(dict(self.settings) | {"run_name": self.run_name})
        return tracker


def _as_gif(path: Path) -> tuple[bytes, int, int]:
    """Encode a video file as a small animated GIF; returns it with its width and height."""
    num_frames, fps = video_length(path)
    every = -(-num_frames // _GIF_FRAMES)
    images = [Image.fromarray(frame.numpy()) for frame in read_video(path, range(0, num_frames, every))]
    for image in images:
        image.thumbnail((_GIF_SIDE, _GIF_SIDE))
    encoded, milliseconds = io.BytesIO(), every * 1000 // fps
    images[0].save(encoded, "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0)
    return encoded.getvalue(), *images[0].size


def _escaped(text: str) -> str:
    """Escape what Markdown would interpret."""
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]()<>#+-.!|~" else letter for letter in " ".join(text.split()))
