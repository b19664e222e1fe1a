"""Validation: the same prompts and seeds after every so many updates, sampled with the ODE and scored."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hyvideo.config.schema import Config
from hyvideo.config.sizes import parse_size
from hyvideo.data.prompts import Prompt
from hyvideo.data.videos import write_video
from hyvideo.evaluation.sampling import sample_prompts
from hyvideo.models.reward_models.rewards import Scores, WeightedReward
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline


@dataclass(frozen=True)
class Validation:
    """Fixed prompts and how they are sampled and scored.

    Attributes:
        pipeline: shares its components with the training pipeline, with the validation's own scheduler steps.
        guidance: as in training.
        prompts: the first `validation_num_videos` of the validation CSVs.
        reward: the training reward.
        config: the run's configuration.
    """

    pipeline: HunyuanVideoGRPOPipeline
    guidance: Guidance
    prompts: Sequence[Prompt]
    reward: WeightedReward
    config: Config

    def __call__(self, folder: Path) -> dict[str, float]:
        """Write the videos and their scores to `folder`; return `valid/*` means (NaN scores left out)."""
        settings = self.config.validation
        videos = sample_prompts(
            self.pipeline,
            self.prompts,
            self.guidance,
            num_frames=settings.validate_video_length,
            size=parse_size(settings.validation_fixed_size),
            seed=settings.validation_global_seed,
            batch_size=self.config.rollout.rollout_micro_batch_size or len(self.prompts),
        )
        texts = [prompt.text for prompt in self.prompts]
        scores = self.reward(videos, texts)
        save_samples(folder, videos, texts, scores, fps=self.config.rollout.video_fps)
        means = {f"valid/{name}": float(values.nanmean()) for name, values in scores.metrics.items()}
        return {"valid/reward": float(scores.total.nanmean()), **means}


def save_samples(folder: Path, videos: Tensor, texts: Sequence[str], scores: Scores, *, fps: float) -> None:
    """Write videos `[B, F, H, W, 3]` as `000.mp4`, ... and their prompts and scores as `scores.jsonl`."""
    rows = []
    for i, (video, text) in enumerate(zip(videos, texts, strict=True)):
        write_video(folder / f"{i:03d}.mp4", video, fps)
        metrics = {name: _number(values[i]) for name, values in scores.metrics.items()}
        rows.append({"video": f"{i:03d}.mp4", "prompt": text, "reward": _number(scores.total[i]), **metrics})
    (folder / "scores.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _number(value: Tensor) -> float | None:
    """Return a JSON number; a failed score (NaN) is null."""
    return None if bool(value.isnan()) else round(float(value), 6)
