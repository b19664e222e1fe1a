"""From the reward group of the configuration to a function that scores videos: names, weights, NaN rules."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hyvideo.config.schema import RewardConfig
from hyvideo.models.reward_models.registry import RewardContext, RewardModel, reward_class
from hyvideo.models.reward_models.remote.client import RemoteReward
from hyvideo.models.reward_models.requested import RequestedReward, check_metrics, check_options, read_requested_rewards
from hyvideo.models.reward_models.scoring import Scorer, Scoring

T = TypeVar("T")


@dataclass(frozen=True)
class Scores:
    """What the rewards say about B videos.

    Attributes:
        metrics: every raw score by name, each `[B]` float32 on the CPU.
        total: `[B]` float32, the weighted sum; NaN where a weighted metric failed.
        weights: weight, not 0, of every metric that is part of the total.
    """

    metrics: Mapping[str, Tensor]
    total: Tensor
    weights: Mapping[str, float]

    def __len__(self) -> int:
        """Number of videos B."""
        return len(self.total)

    def at(self, videos: Tensor) -> "Scores":
        """Return the scores of some videos, long `[b]`, in that order."""
        metrics = {name: values[videos] for name, values in self.metrics.items()}
        return Scores(metrics, self.total[videos], self.weights)


class WeightedReward:
    """Composite reward `R = sum_m w_m metric_m` (paper, reward settings A and B) over one or more rewards.

    A metric goes by its own name, or by `<reward>/<metric>` where several rewards give one of that name.

    Args:
        choices: which rewards, with their weights.
        models: the reward of each choice.
        config: how videos get to them.
        context: where the rewards run.

    Attributes:
        weights: weight, not 0, of every metric that is part of the total.
        asynchronous: whether videos are scored while the next ones are sampled (`reward_async`).
        max_failed: share of the videos of all ranks that may have no total (`reward_max_failed`).

    Raises:
        ValueError: a weight is given for a metric that does not exist.
    """

    def __init__(
        self,
        choices: Sequence[RequestedReward],
        models: Sequence[RewardModel],
        config: RewardConfig,
        context: RewardContext,
    ) -> None:
        for choice, model in zip(choices, models, strict=True):
            check_metrics(choice, model.metrics)
        self._config = config
        self.asynchronous, self.max_failed = config.reward_async, config.reward_max_failed
        self._context = context
        self._choices = choices
        self._scorers = [
            Scorer(
                choice.name,
                model,
                model.reads == "file" and config.reward_io == "file",
                ThreadPoolExecutor(config.remote_reward_in_flight if choice.url else 1, f"reward-{choice.name}"),
            )
            for choice, model in zip(choices, models, strict=True)
        ]
        given = [metric for model in models for metric in model.metrics]
        self._names = [
            {
                metric: metric if given.count(metric) == 1 else f"{scorer.name}/{metric}"
                for metric in scorer.model.metrics
            }
            for scorer in self._scorers
        ]
        self.weights = {
            names[metric]: choice.weight * weight
            for choice, names in zip(choices, self._names, strict=True)
            for metric, weight in choice.sub_reward.items()
            if choice.weight * weight != 0
        }
        if config.reward_offload:
            self._move("cpu")

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Scores:
        """Score videos `[B, F, H, W, 3]` uint8 for their B prompts."""
        scoring = self.begin()
        scoring.add(videos, prompts)
        return self.finish(scoring)

    def begin(self) -> Scoring:
        """Start scoring a round whose videos arrive in parts: `add` them, then `finish`."""
        if self._config.reward_offload:
            self._move(self._context.device)
        return Scoring(self._scorers, self._config.reward_batch_size, self._context.video_fps)

    def finish(self, scoring: Scoring) -> Scores:
        """Wait for a round's scores; as `__call__`, to which it is equal whenever the videos came."""
        try:
            parts = scoring.result()
        finally:
            if self._config.reward_offload:
                self._move("cpu")
        metrics = {
            names[metric]: values
            for names, scores in zip(self._names, parts, strict=True)
            for metric, values in scores.items()
        }
        total = torch.stack([weight * metrics[name] for name, weight in self.weights.items()]).sum(0)
        return Scores(metrics, total, self.weights)

    def describe(self) -> str:
        """Say in one line what is scored, how, and what the total is."""
        models = "; ".join(
            f"{scorer.name} ({scorer.model.describe()}{', through mp4' if scorer.reads_files else ''}"
            f"{f', at {choice.url}' if choice.url else ''})"
            for choice, scorer in zip(self._choices, self._scorers, strict=True)
        )
        return f"{models}; total = {' + '.join(f'{weight:g} {name}' for name, weight in self.weights.items())}"

    def _move(self, device: torch.device | str) -> None:
        for scorer in self._scorers:
            scorer.model.to(device)


def get_reward_fn(
    config: RewardConfig,
    device: torch.device | str = "cpu",
    *,
    model_root: str | Path = "ckpts",
    video_fps: float = 24,
) -> WeightedReward:
    """Build the rewards that `config` names.

    Args:
        config: the reward group of the configuration.
        device: where reward networks run; with `reward_offload` only while they score.
        model_root: folder of the base model, where VideoAlign's weights lie by default.
        video_fps: frames per second of the videos.

    Raises:
        ValueError: an unknown reward (the known ones are listed), weights that do not fit it, missing weights, or a
            reward server that does not answer.

    Example:
        >>> reward = get_reward_fn(RewardConfig(reward_model="moving_shapes"))
        >>> reward(videos, prompts).total
    """
    choices = _checked_choices(config)
    context = RewardContext(device, Path(model_root), video_fps, config.reward_batch_size)
    models = [
        _with_options(reward_class(choice.name), choice.name, context, choice.options)
        if choice.url is None
        else RemoteReward(context, choice.name, choice.url, config)
        for choice in choices
    ]
    return WeightedReward(choices, models, config, context)


def build_reward(name: str, options: Mapping[str, Any], context: RewardContext) -> RewardModel:
    """Build one registered reward, without weights.

    Raises:
        ValueError: it is unknown (the known ones are listed), its options do not fit, or its weights are missing.
    """
    reward = reward_class(name)
    check_options(name, options, reward)
    return _with_options(reward, name, context, options)


def _with_options(act: Callable[..., T], name: str, context: RewardContext, options: Mapping[str, Any]) -> T:
    """Build or check a reward; an option of another type than it takes is a ValueError."""
    try:
        return act(context, **options)
    except TypeError as error:
        raise ValueError(f"reward_config: {name} cannot use its options {dict(options)}: {error}.") from error


def check_rewards(config: RewardConfig, model_root: str | Path, video_fps: float) -> None:
    """Refuse what `get_reward_fn` would refuse, as far as it shows without loading a network.

    Raises:
        ValueError: as `get_reward_fn`.
    """
    context = RewardContext(model_root=Path(model_root), video_fps=video_fps)
    for choice in _checked_choices(config):
        if choice.url is None:
            _with_options(reward_class(choice.name).check, choice.name, context, choice.options)
        else:
            check_metrics(choice, RemoteReward(context, choice.name, choice.url, config).metrics)


def _checked_choices(config: RewardConfig) -> list[RequestedReward]:
    """Return the rewards of a configuration; those of this process are known and fit their weights and options."""
    choices = read_requested_rewards(config)
    for choice in choices:
        if choice.url is None:
            reward = reward_class(choice.name)
            check_metrics(choice, reward.metrics)
            check_options(choice.name, choice.options, reward)
    return choices
