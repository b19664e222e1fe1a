"""Score videos in blocks while they arrive, so that scoring may overlap with what makes the next ones."""

import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.data.videos import write_video
from hyvideo.models.reward_models.registry import RewardModel, checked_scores


@dataclass(frozen=True)
class Scorer:
    """One reward and the threads that run it.

    Attributes:
        name: of the reward.
        model: the reward.
        reads_files: whether it gets mp4 files.
        threads: one for a reward in this process, as many as requests may be in flight for a remote one.
    """

    name: str
    model: RewardModel
    reads_files: bool
    threads: ThreadPoolExecutor


class Scoring:
    """Videos of one round on their way to their scores.

    Blocks of `block_size` videos are handed to the rewards as soon as they are full. Blocks do not depend on how the
    videos arrive, so neither do the scores.

    Args:
        scorers: every reward scores every block.
        block_size: videos per block.
        video_fps: frames per second of the mp4 files.
    """

    def __init__(self, scorers: Sequence[Scorer], block_size: int, video_fps: float) -> None:
        self._scorers = scorers
        self._block_size = block_size
        self._video_fps = video_fps
        self._folder = tempfile.TemporaryDirectory(prefix="rewards-")
        self._waiting: list[tuple[Tensor, str]] = []
        self._results: list[list[Future[dict[str, Tensor]]]] = []

    def add(self, videos: Tensor, prompts: Sequence[str]) -> None:
        """Add videos `[b, F, H, W, 3]` uint8 and their prompts, and start scoring what fills a block."""
        self._waiting += zip(videos, prompts, strict=True)
        while len(self._waiting) >= self._block_size:
            self._start_block()

    def result(self) -> list[dict[str, Tensor]]:
        """Wait for everything added; return each scorer's metrics, `[B]` float32 on the CPU in order of arrival.

        Raises:
            ValueError: a reward returned other metrics or shapes than it declares.
            Exception: whatever a reward raised.
        """
        try:
            if self._waiting:
                self._start_block()
            blocks = [[future.result() for future in block] for block in self._results]
        finally:
            self._close()
        return [_concatenated(parts) for parts in zip(*blocks, strict=True)]

    def _close(self) -> None:
        """Drop what has not begun, wait for what has, and remove the files."""
        futures = [future for block in self._results for future in block]
        for future in futures:
            future.cancel()
        wait(futures)
        self._folder.cleanup()

    def _start_block(self) -> None:
        chosen, self._waiting = self._waiting[: self._block_size], self._waiting[self._block_size :]
        videos, prompts = zip(*chosen, strict=True)
        folder = Path(self._folder.name) / str(len(self._results))
        block = _Block(torch.stack(videos), prompts, folder, self._video_fps)
        self._results.append([scorer.threads.submit(block.score, scorer) for scorer in self._scorers])


class _Block:
    """Videos that are scored together; their files are written once, when the first reward asks for them."""

    def __init__(self, videos: Tensor, prompts: Sequence[str], folder: Path, video_fps: float) -> None:
        self._videos = videos
        self._prompts = prompts
        self._folder = folder
        self._video_fps = video_fps
        self._lock = threading.Lock()

    def score(self, scorer: Scorer) -> dict[str, Tensor]:
        """Run one reward; each of its metrics `[b]` float32 on the CPU."""
        scores = scorer.model(self._files() if scorer.reads_files else self._videos, self._prompts)
        return checked_scores(scorer.name, scorer.model, scores, len(self._prompts))

    def _files(self) -> list[Path]:
        paths = [self._folder / f"{index}.mp4" for index in range(len(self._videos))]
        with self._lock:
            for path, video in zip(paths, self._videos, strict=True):
                if not path.exists():
                    write_video(path, video, self._video_fps)
        return paths


def _concatenated(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
