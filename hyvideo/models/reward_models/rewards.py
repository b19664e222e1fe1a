"""From a reward's name and weights in the config to a function that scores videos."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hyvideo.config.schema import RewardConfig
from hyvideo.models.reward_models.moving_shapes import MovingShapesReward


class RewardModel(Protocol):
    """What a reward is: a name for each number it gives, and a call that gives them.

    Attributes:
        metrics: names of its scores.
    """

    metrics: Sequence[str]

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Score videos `[B, F, H, W, 3]` uint8 for their prompts: each metric `[B]` float32, NaN where it failed."""
        ...


REWARD_MODELS: dict[str, type[RewardModel]] = {"moving_shapes": MovingShapesReward}


@dataclass(frozen=True)
class Scores:
    """What the reward says of B videos.

    Attributes:
        metrics: every raw score by name, each `[B]` float32 on the CPU.
        total: `[B]` float32, the weighted sum; NaN where a weighted metric failed.
    """

    metrics: Mapping[str, Tensor]
    total: Tensor


class WeightedReward:
    """Composite reward `R = sum_m w_m metric_m` (paper, reward settings A and B).

    Args:
        model: the reward.
        weights: a finite weight per metric, at least one not 0; metrics without a weight are logged only.

    Raises:
        ValueError: an unknown metric, or weights that are empty, not finite or all 0.
    """

    def __init__(self, model: RewardModel, weights: Mapping[str, float]) -> None:
        unknown = sorted(set(weights) - set(model.metrics))
        if unknown:
            raise ValueError(
                f"reward_weights: {type(model).__name__} has no metric {', '.join(unknown)}; "
                f"expected some of {', '.join(model.metrics)}."
            )
        if not all(math.isfinite(weight) for weight in weights.values()) or not any(weights.values()):
            raise ValueError(f"reward_weights: expected finite weights, at least one not 0; received {dict(weights)}.")
        self.model = model
        self.weights = dict(weights)

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Scores:
        """Score videos `[B, F, H, W, 3]` uint8 for their B prompts."""
        scored = self.model(videos, prompts)
        metrics = {name: scored[name].detach().float().cpu() for name in self.model.metrics}
        total = torch.stack([weight * metrics[name] for name, weight in self.weights.items()]).sum(0)
        return Scores(metrics, total)


def get_reward_fn(config: RewardConfig, device: torch.device | str = "cpu") -> WeightedReward:
    """Build the reward that `config` names.

    Args:
        config: the reward group of the configuration.
        device: where a reward network runs; `moving_shapes` measures pixels on the CPU.

    Raises:
        ValueError: an unknown reward (the known ones are listed), or weights that do not fit it.
    """
    if config.reward_model not in REWARD_MODELS:
        nearest = difflib.get_close_matches(config.reward_model, REWARD_MODELS, n=1, cutoff=0)
        raise ValueError(
            f"reward_model: no reward named '{config.reward_model}' is available; expected one of "
            f"{', '.join(REWARD_MODELS)}. Nearest: {''.join(nearest)}."
        )
    return WeightedReward(REWARD_MODELS[config.reward_model](), config.reward_weights)
