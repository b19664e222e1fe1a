"""Small real rewards for tests of what surrounds a reward, and videos whose scores are known."""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.data.videos import read_video
from hyvideo.models.reward_models.registry import RewardContext, RewardModel, Videos
from hyvideo.models.reward_models.rewards import Scores, WeightedReward

BRIGHTNESS = "tests.support.rewards:Brightness"

GUARDED = {
    **{"validation_interval": 1, "validation_num_videos": 8, "validate_at_step0": True},
    **{"learning_rate": 5e-3, "lr_warmup_steps": 0, "kl_weight": 0},
}
"""Settings with which a run learns brightness fast, and a guard looks at every update."""


def grey_videos(*levels: int, frames: int = 5) -> Tensor:
    """One video per grey level, uint8 `[B, F, H, W, 3]`."""
    return torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1, 1).repeat(1, frames, 32, 32, 3)


def moving_square(num_frames: int = 9, height: int = 64, width: int = 64, colour=(220, 40, 40)) -> Tensor:
    """Return uint8 frames `[F, H, W, 3]` of a square of 12 pixels that moves right by 2 pixels a frame, on white."""
    frames = torch.full((num_frames, height, width, 3), 255, dtype=torch.uint8)
    for f in range(num_frames):
        frames[f, 4:16, 2 * f : 2 * f + 12] = torch.tensor(colour, dtype=torch.uint8)
    return frames


def scoring_with(reward: WeightedReward, score: Callable[[Tensor, Sequence[str]], Scores]) -> WeightedReward:
    other = copy.copy(reward)
    call = {"__call__": lambda self, videos, prompts: score(videos, prompts)}
    other.__class__ = type("Other", (type(reward),), call)
    return other


class Brightness(RewardModel):
    """The mean pixel; a prompt `fail` gives NaN, `infinite` infinity, `raise` an error.

    It notes every device it was moved to, the size of every batch, and the most calls that ran at once (`threads`).
    """

    metrics = ("brightness", "length")

    def __init__(self, context: RewardContext = RewardContext(), seconds: float = 0.0) -> None:  # noqa: B008
        super().__init__(context)
        self._seconds, self._lock = seconds, threading.Lock()
        self.devices: list[str] = []
        self.calls: list[int] = []
        self.threads = self._running = 0

    def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        with self._lock:
            self.calls.append(len(prompts))
            self._running += 1
            self.threads = max(self.threads, self._running)
        time.sleep(self._seconds * len(prompts))
        frames = videos if isinstance(videos, Tensor) else torch.stack([read_video(path) for path in videos])
        brightness = frames.float().mean((1, 2, 3, 4))
        for index, prompt in enumerate(prompts):
            if prompt == "raise":
                raise RuntimeError("the reward broke")
            if prompt in ("fail", "infinite"):
                brightness[index] = {"fail": torch.nan, "infinite": torch.inf}[prompt]
        with self._lock:
            self._running -= 1
        return {"brightness": brightness, "length": torch.tensor([float(len(prompt)) for prompt in prompts])}

    def to(self, device: torch.device | str) -> None:
        self.devices.append(str(device))


class Blackening(Brightness):
    """The mean pixel; it leaves nothing of the videos that it was given."""

    def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        scores = super().__call__(videos, prompts)
        videos.fill_(0)
        return scores


class Corner(RewardModel):
    """The first value of every video; takes its time and no memory of its own."""

    metrics = ("corner",)

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        time.sleep(self._seconds)
        return {"corner": videos[:, 0, 0, 0, 0].float()}


class FileBrightness(Brightness):
    """The mean pixel of what it is given; it notes paths and sizes, in bytes, of the files it reads."""

    reads = "file"

    def __init__(self, context: RewardContext = RewardContext()) -> None:  # noqa: B008
        super().__init__(context)
        self.paths: list[Path] = []
        self.sizes: list[int] = []

    def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        paths = [] if isinstance(videos, Tensor) else videos
        self.paths += paths
        self.sizes += [path.stat().st_size for path in paths]
        return super().__call__(videos, prompts)
