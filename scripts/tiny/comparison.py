"""Post-train the tiny model and compare it with its base on held-out prompts; demo and learning proof share it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from hyvideo.config.schema import Config
from hyvideo.config.sizes import parse_size
from hyvideo.data.prompts import Prompt, read_prompts
from hyvideo.evaluation.paired import PairedGain, paired_gain
from hyvideo.evaluation.sampling import sample_prompts
from hyvideo.models.reward_models.rewards import Scores
from hyvideo.training.trainer import Trainer


@dataclass(frozen=True)
class Sampled:
    """Held-out prompts sampled with the ODE.

    Attributes:
        videos: `[N, F, H, W, 3]` uint8.
        scores: of those videos.
    """

    videos: Tensor
    scores: Scores


def held_out_prompts(config: Config, count: int) -> list[Prompt]:
    """Return `count` held-out prompts; the list is repeated when it is shorter, each prompt with noise of its own."""
    prompts = read_prompts(config.data.valid_video_csv)
    return [Prompt(prompts[i % len(prompts)].text, i, None, None) for i in range(count)]


def sample_held_out(trainer: Trainer, prompts: Sequence[Prompt]) -> Sampled:
    """Sample `prompts` with the trainer's present policy and score the videos; seeds are fixed."""
    settings = trainer.config.validation
    videos = sample_prompts(
        trainer.validation.pipeline,
        prompts,
        trainer.validation.guidance,
        num_frames=settings.validate_video_length,
        size=parse_size(settings.validation_fixed_size),
        seed=settings.validation_global_seed,
        batch_size=trainer.config.rollout.rollout_micro_batch_size or 16,
    )
    return Sampled(videos, trainer.validation.reward(videos, [prompt.text for prompt in prompts]))


def gains(before: Scores, after: Scores) -> dict[str, PairedGain]:
    """Return the paired gain of the total reward and of each metric, with 95 % intervals."""
    metrics = {name: paired_gain(before.metrics[name], after.metrics[name]) for name in before.metrics}
    return {"reward": paired_gain(before.total, after.total), **metrics}


def write_gains(path: Path, result: dict[str, PairedGain]) -> None:
    """Write the gains as JSON."""
    path.write_text(json.dumps({name: asdict(gain) for name, gain in result.items()}, indent=1) + "\n")
