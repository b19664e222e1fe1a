"""From the reward group of the configuration to a function that scores videos: names, weights, NaN rules."""

import inspect
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from torch import Tensor

from hyvideo.config.outside import as_value_error
from hyvideo.config.schema import RewardConfig
from hyvideo.data.videos import write_video
from hyvideo.models.reward_models.registry import RewardContext, RewardModel, checked_answer, reward_class
from hyvideo.models.reward_models.remote.client import RemoteReward


@dataclass(frozen=True)
class RequestedReward:
    """One reward of a configuration.

    Attributes:
        name: as it is registered here, or on its server.
        weight: factor on all of its metrics.
        sub_reward: metric -> weight; a metric without one, or with 0, is logged only.
        options: arguments of its constructor.
        url: server that scores it, or None for this process.
        setting: what asks for it, for messages.
    """

    name: str
    weight: float
    sub_reward: Mapping[str, float]
    options: Mapping[str, Any]
    url: str | None
    setting: str


class _Entry(BaseModel, strict=True, extra="forbid"):
    """What `reward_config` or `reward_guard` says of one reward."""

    weight: FiniteFloat = 1.0
    sub_reward: dict[str, FiniteFloat]
    options: dict[str, Any] = {}
    url: str | None = None


class _Entries(BaseModel, strict=True, extra="forbid"):
    models: Annotated[dict[str, _Entry], Field(min_length=1)]


def read_requested_rewards(config: RewardConfig, setting: str = "reward_config") -> list[RequestedReward]:
    """Read the rewards that train, or with the setting `reward_guard` those that judge a guarded run, or none.

    Where `reward_config` is None, the short form `reward_model` with `reward_weights` takes its place. What cannot be
    understood, weights that are all 0 and an address with a password are a ValueError, which does not repeat it.
    """
    given = getattr(config, setting)
    if given is None and setting == "reward_guard":
        return []
    if given is None:
        setting, path = "reward_model", config.reward_checkpoint_path
        options = {} if path is None else {"checkpoint": path}
        given = {"models": {config.reward_model: {"sub_reward": config.reward_weights, "options": options}}}
    shape = '{"models": {NAME: {"weight": 1.0, "sub_reward": {METRIC: WEIGHT}}}}'
    with as_value_error(f"{setting}: expected {shape}, with some of weight, options and url", ValidationError):
        entries = _Entries.model_validate(given).models
    choices = []
    for name, entry in entries.items():
        url = entry.url if "url" in entry.model_fields_set else config.remote_reward_url
        if url is not None and "@" in url:
            raise ValueError(
                f"{setting}: the address of {name}'s server holds a user or password, which config.yaml and logs would "
                "show: leave it out, and put the token into the environment variable REWARD_TOKEN."
            )
        if url is not None and entry.options:
            raise ValueError(f"{setting}: {name} is scored at {url}; give its options to that server's --reward.")
        choices.append(RequestedReward(name, entry.weight, entry.sub_reward, entry.options, url, setting))
    if not any(choice.weight * weight for choice in choices for weight in choice.sub_reward.values()):
        raise ValueError(f"{setting}: expected at least one weight other than 0; received {choices}.")
    return choices


def loaded_rewards(config: RewardConfig) -> list[RequestedReward]:
    """Return the rewards that a run computes itself, its judge's included; errors as `read_requested_rewards`."""
    return [choice for choice in _all_rewards(config) if choice.url is None]


def _all_rewards(config: RewardConfig) -> list[RequestedReward]:
    return [*read_requested_rewards(config), *read_requested_rewards(config, "reward_guard")]


@dataclass(frozen=True)
class Scores:
    """What the rewards say about B videos.

    Attributes:
        metrics: every raw score by name, each `[B]` float32 on the CPU.
        total: `[B]` float32, the weighted sum over the metrics that apply to the video's prompt; NaN where one of them
            failed, or none applies.
        weights: weight, not 0, of every metric that is part of the total.
        applies: `[B]` bool of every metric, whether it judges videos of this prompt; a metric that is not named does.
    """

    metrics: Mapping[str, Tensor]
    total: Tensor
    weights: Mapping[str, float]
    applies: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of videos B."""
        return len(self.total)

    def at(self, videos: Tensor) -> "Scores":
        """Return the scores of some videos, long `[b]`, in that order."""
        metrics = {name: values[videos] for name, values in self.metrics.items()}
        applies = {name: values[videos] for name, values in self.applies.items()}
        return Scores(metrics, self.total[videos], self.weights, applies)

    @classmethod
    def join(cls, parts: Sequence["Scores"]) -> "Scores":
        """Return the scores of all parts as one, in their order."""
        metrics, applies = (
            {name: torch.cat([getattr(part, of)[name] for part in parts]) for name in getattr(parts[0], of)}
            for of in ("metrics", "applies")
        )
        return cls(metrics, torch.cat([part.total for part in parts]), parts[0].weights, applies)

    def failed(self) -> Tensor:
        """Which videos have no total though a weighted metric applies to their prompt, `[B]` bool."""
        asked = [self.applies[name] for name in self.weights if name in self.applies]
        return self.total.isnan() & (torch.stack(asked).any(0) if asked and len(asked) == len(self.weights) else True)

    def weighted(self) -> dict[str, Tensor]:
        """Return the metrics that have a weight, `[B]` each: 0 where one does not apply, which all of a group share."""
        return {
            name: self.metrics[name].masked_fill(~self.applies[name], 0) if name in self.applies else self.metrics[name]
            for name in self.weights
        }


@dataclass(frozen=True)
class _Scorer:
    """One reward at work, whether it gets mp4 files, and its metrics -> their names among those of all rewards."""

    choice: RequestedReward
    model: RewardModel
    names: Mapping[str, str]
    reads_files: bool
    threads: ThreadPoolExecutor


class Scoring:
    """Videos of one round on their way to their scores, so that scoring may overlap with what makes the next ones.

    Every reward gets blocks of `block_size` videos as soon as they are full. Blocks do not depend on how the videos
    arrive, so neither do the scores.
    """

    def __init__(self, scorers: Sequence[_Scorer], block_size: int, video_fps: float, crf: int) -> None:
        self._scorers, self._block_size, self._video_fps, self._crf = scorers, block_size, video_fps, crf
        self._folder = tempfile.TemporaryDirectory(prefix="rewards-")
        self._waiting: list[tuple[Tensor, str]] = []
        self._results: list[list[Future[tuple[dict[str, Tensor], Tensor]]]] = []

    def add(self, videos: Tensor, prompts: Sequence[str]) -> None:
        """Add videos `[b, F, H, W, 3]` uint8 and their prompts, and start scoring what fills a block."""
        self._waiting += zip(videos, prompts, strict=True)
        while len(self._waiting) >= self._block_size:
            self._start_block()

    def result(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Wait for all videos: every metric `[B]` float32, whether it applies `[B]` bool, on the CPU as they came."""
        try:
            if self._waiting:
                self._start_block()
            blocks = [[future.result() for future in block] for block in self._results]
        finally:
            futures = [future for block in self._results for future in block]
            for future in futures:
                future.cancel()
            wait(futures)
            self._folder.cleanup()
        metrics, applies = {}, {}
        for scorer, parts in zip(self._scorers, zip(*blocks, strict=True), strict=True):
            for metric, name in scorer.names.items():
                metrics[name] = torch.cat([scores[metric] for scores, _ in parts])
                applies[name] = torch.cat([applies_to for _, applies_to in parts])
        return metrics, applies

    def _start_block(self) -> None:
        chosen, self._waiting = self._waiting[: self._block_size], self._waiting[self._block_size :]
        videos, prompts = zip(*chosen, strict=True)
        folder, block = Path(self._folder.name) / str(len(self._results)), torch.stack(videos)
        submitted = [
            scorer.threads.submit(self._score, scorer, block, prompts, folder / str(number))
            for number, scorer in enumerate(self._scorers)
        ]
        self._results.append(submitted)

    def _score(self, scorer: _Scorer, videos: Tensor, prompts: Sequence[str], folder: Path) -> tuple[dict, Tensor]:
        """Return one reward's metrics of b videos, and whether it applies, `[b]` each; it may write into the videos."""
        name, shown = scorer.choice.name, [folder / f"{index}.mp4" for index in range(len(videos))]
        if scorer.reads_files:
            for path, video in zip(shown, videos, strict=True):
                write_video(path, video, self._video_fps, self._crf)
        else:
            shown = videos.clone() if len(self._scorers) > 1 else videos
        found = checked_answer(name, scorer.model, shown, prompts)
        return found, torch.tensor([scorer.model.applies(prompt) for prompt in prompts])


def frames_of_reward(error: BaseException) -> TracebackType | None:
    """Return the part of an error's traceback that begins where a reward was called; None where none was."""
    callers, found = (Scoring._score.__code__, checked_answer.__code__), None
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code in callers:
            found = trace.tb_next
        trace = trace.tb_next
    return found


class WeightedReward:
    """Composite reward `R = sum_m w_m metric_m` (paper, reward settings A and B) over one or more rewards.

    A metric goes by its own name, or by `<reward>/<metric>` where several rewards give one of that name.

    Attributes:
        weights: weight, not 0, of every metric that is part of the total.
        asynchronous: whether videos are scored while the next ones are sampled (`reward_async`).
        max_failed: share of the videos of all ranks that may have no total (`reward_max_failed`).
    """

    def __init__(
        self,
        choices: Sequence[RequestedReward],
        models: Sequence[RewardModel],
        config: RewardConfig,
        context: RewardContext,
        *,
        offload: bool = False,
        crf: int = 16,
    ) -> None:
        self._config, self._context, self._offload, self._crf = config, context, offload, crf
        self.asynchronous, self.max_failed = config.reward_async, config.reward_max_failed
        given = [metric for model in models for metric in model.metrics]
        self._scorers: list[_Scorer] = []
        self.weights: dict[str, float] = {}
        for choice, model in zip(choices, models, strict=True):
            names = {m: m if given.count(m) == 1 else f"{choice.name}/{m}" for m in model.metrics}
            reads_files = model.reads == "file" and config.reward_io == "file"
            at_once = context.in_flight if choice.url else 1
            threads = ThreadPoolExecutor(at_once, f"reward-{choice.name}")
            self._scorers.append(_Scorer(choice, model, names, reads_files, threads))
            weights = {names[metric]: choice.weight * weight for metric, weight in choice.sub_reward.items()}
            self.weights |= {name: weight for name, weight in weights.items() if weight != 0}
        self._weighted = [
            scorer for scorer in self._scorers if not self.weights.keys().isdisjoint(scorer.names.values())
        ]
        self._move("cpu")

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Scores:
        """Score videos `[B, F, H, W, 3]` uint8 for their B prompts."""
        scoring = self.begin()
        scoring.add(videos, prompts)
        return self.finish(scoring)

    def begin(self) -> Scoring:
        """Start scoring a round whose videos arrive in parts: `add` them, then `finish`."""
        config = self._config
        self._move(self._context.device)
        return Scoring(self._scorers, config.reward_batch_size, self._context.video_fps, self._crf)

    def finish(self, scoring: Scoring) -> Scores:
        """Wait for a round's scores; as `__call__`, to which it is equal whenever the videos came."""
        try:
            metrics, applies = scoring.result()
        finally:
            self._move("cpu")
        weighted = Scores(metrics, torch.empty(0), self.weights, applies).weighted()
        total = torch.stack([weight * weighted[name] for name, weight in self.weights.items()]).sum(0)
        judged = torch.stack([applies[name] for name in self.weights]).any(0)
        return Scores(metrics, total.masked_fill(~judged, torch.nan), self.weights, applies)

    def applies(self, prompt: str) -> bool:
        """Whether a weighted metric can judge videos of this prompt; rewards on a server say it only with scores."""
        return any(scorer.model.applies(prompt) for scorer in self._weighted)

    def check_prompts(self, prompts: Sequence[str]) -> str | None:
        """Return a warning if the weighted metrics judge no videos of some prompts; a ValueError if of none at all.

        Rewards on a server say it only with their scores.
        """
        without = [prompt for prompt in prompts if not self.applies(prompt)]
        if not without:
            return None
        names = " and ".join(scorer.choice.name for scorer in self._weighted)
        told = (
            f"{names} cannot judge the videos of {len(without)} of {len(prompts)} training prompts, such as "
            f"{without[0]!r:.200}"
        )
        if len(without) == len(prompts):
            raise ValueError(f"reward_model: {told}. Choose other prompts, or add a reward that judges them.")
        return f"{told}: nothing is learned from them. Leave them out, or add a reward that judges them."

    def describe(self) -> str:
        """Say in one line what is scored, how, and what the total is."""
        models = "; ".join(
            f"{scorer.choice.name} ({scorer.model.describe()}{', through mp4' if scorer.reads_files else ''}"
            f"{f', at {scorer.choice.url}' if scorer.choice.url else ''})"
            for scorer in self._scorers
        )
        return f"{models}; total = {' + '.join(f'{weight:g} {name}' for name, weight in self.weights.items())}"

    def _move(self, device: torch.device | str) -> None:
        for scorer in self._scorers if self._offload else ():
            scorer.model.to(device)


def get_reward_fn(
    config: RewardConfig,
    device: torch.device | str = "cpu",
    *,
    model_root: str | Path = "ckpts",
    video_fps: float = 24,
    prompt_csvs: Sequence[str] = (),
    offload: bool = False,
    crf: int = 16,
    setting: str = "reward_config",
) -> WeightedReward:
    """Build the rewards that `config`, the reward group of the configuration, names.

    Their networks run on `device`, with `offload` only while they score. VideoAlign's weights lie below
    `model_root` by default; `prompt_csvs` are the files of the prompts, and `crf` is the compression of mp4 files. The
    setting `reward_guard` builds the judge. A ValueError for an unknown reward (the known ones are listed), weights
    that are missing or do not fit it, and a server that does not answer.
    """
    choices = read_requested_rewards(config, setting)
    asked = {"batch_size": config.reward_batch_size, "timeout": config.remote_reward_timeout}
    context = RewardContext(device, Path(model_root), video_fps, prompt_csvs=prompt_csvs, **asked)
    models = [_reward(choice, context, load=True) for choice in choices]
    return WeightedReward(choices, models, config, context, offload=offload, crf=crf)


def build_reward(name: str, options: Mapping[str, Any], context: RewardContext) -> RewardModel:
    """Build one registered reward, without weights; a ValueError as in `get_reward_fn`."""
    return _reward(RequestedReward(name, 1.0, {}, options, None, "--reward"), context, load=True)


def check_rewards(
    config: RewardConfig, model_root: str | Path, video_fps: float, prompt_csvs: Sequence[str] = ()
) -> None:
    """Refuse, by a ValueError, what `get_reward_fn` would refuse, as far as it shows without loading a network.

    The judge of a guarded run is checked too.
    """
    asked = {"batch_size": config.reward_batch_size, "timeout": config.remote_reward_timeout}
    context = RewardContext("cpu", Path(model_root), video_fps, prompt_csvs=prompt_csvs, **asked)
    for choice in _all_rewards(config):
        _reward(choice, context, load=False)


def _reward(choice: RequestedReward, context: RewardContext, *, load: bool) -> RewardModel | None:
    """Build a reward, or only check it; its end of the program is a ValueError too."""
    at_server = choice.url is not None
    reward = RemoteReward(context, choice.name, choice.url) if at_server else reward_class(choice.name, choice.setting)
    if unknown := [metric for metric in choice.sub_reward if metric not in reward.metrics]:
        known = ", ".join(reward.metrics)
        raise ValueError(
            f"{choice.setting}: {choice.name} has no metric {', '.join(unknown)}; expected some of {known}."
        )
    if at_server:
        return reward
    try:
        inspect.signature(reward).bind(context, **choice.options)  # most check nothing before they are built
        return (reward if load else reward.check)(context, **choice.options)
    except (TypeError, SystemExit) as error:
        taken = ", ".join([*inspect.signature(reward).parameters][1:])
        flag = " (reward_checkpoint_path gives the checkpoint)" if choice.setting == "reward_model" else ""
        raise ValueError(
            f"{choice.setting}: {choice.name} cannot use its options {dict(choice.options)}: {error!r}; it takes "
            f"{taken or 'none'}{flag}."
        ) from error
