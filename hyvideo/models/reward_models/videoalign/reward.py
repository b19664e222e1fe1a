"""VideoAlign as a reward: the weights below the model root, in the precision of the device."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.models.reward_models.registry import RewardContext, RewardModel, Videos, register_reward
from hyvideo.models.reward_models.videoalign.scorer import VideoAlignScorer
from hyvideo.models.reward_models.videoalign.settings import METRICS, read_settings


@register_reward("videoalign_local")
class VideoAlignReward(RewardModel):
    """Normalised VQ, MQ and TA of VideoReward.

    Args:
        context: of the run.
        checkpoint: the VideoReward folder; None: `VideoReward` below the model root.
        dtype: `bf16` or `fp32`; None: bf16 on a GPU, fp32 on the CPU.

    Raises:
        ValueError: another dtype, or a folder that is incomplete or does not fit.
    """

    metrics = METRICS
    reads = "file"

    def __init__(self, context: RewardContext, checkpoint: str | None = None, dtype: str | None = None) -> None:
        super().__init__(context)
        dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
        name = dtype or ("fp32" if torch.device(context.device).type == "cpu" else "bf16")
        if name not in dtypes:
            raise ValueError(f"videoalign_local: expected dtype bf16 or fp32, received {dtype!r}.")
        self._scorer = VideoAlignScorer(_folder(context, checkpoint), context.device, dtypes[name], context.batch_size)
        self._dtype = name

    @classmethod
    def check(cls, context: RewardContext, checkpoint: str | None = None, dtype: str | None = None) -> None:
        """Read what the folder declares."""
        read_settings(_folder(context, checkpoint))

    def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score mp4 files, or frames `[B, F, H, W, 3]` at the run's frame rate."""
        if isinstance(videos, Tensor):
            scores = self._scorer.score_frames(videos, self.context.video_fps, prompts)
        else:
            scores = self._scorer.score(videos, prompts)
        return {metric: torch.tensor(scores[metric]) for metric in METRICS}

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._scorer.to(device)

    def describe(self) -> str:
        """Say what the scores depend on."""
        settings = self._scorer.settings
        frames = f"{settings.num_frames} frames" if settings.num_frames else f"{settings.fps:g} frames per second"
        return f"normalised VQ, MQ, TA from {frames}, {self._dtype}"


def _folder(context: RewardContext, checkpoint: str | None) -> Path:
    """Return the VideoReward folder."""
    return Path(checkpoint) if checkpoint else context.model_root / "VideoReward"
