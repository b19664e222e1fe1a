"""Which rewards a configuration asks for, with which weights: checked as far as it can be before any is loaded."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from hyvideo.config.schema import RewardConfig
from hyvideo.models.reward_models.registry import RewardModel

_KEYS = ("weight", "sub_reward", "options", "url")
_FLAG = " (or, for the reward that --reward_model names, the flag --reward_checkpoint_path)"


@dataclass(frozen=True)
class RequestedReward:
    """One reward of a configuration.

    Attributes:
        name: as it is registered here, or on its server.
        weight: factor on all of its metrics.
        sub_reward: metric -> weight; a metric without one, or with 0, is logged only.
        options: arguments of its constructor.
        url: server that scores it, or None for this process.
    """

    name: str
    weight: float
    sub_reward: Mapping[str, float]
    options: Mapping[str, Any]
    url: str | None


def read_requested_rewards(config: RewardConfig) -> list[RequestedReward]:
    """Read `reward_config`, or where it is None the short form `reward_model` with `reward_weights`.

    Unknown keys, or weights that are missing, not finite numbers or all 0, are a ValueError.
    """
    if config.reward_config is None:
        options = {} if config.reward_checkpoint_path is None else {"checkpoint": config.reward_checkpoint_path}
        weights = _numbers(config.reward_weights, "reward_weights")
        url = _address("remote_reward_url", config.remote_reward_url)
        choices = [RequestedReward(config.reward_model, 1.0, weights, options, url)]
    else:
        models = config.reward_config.get("models")
        if list(config.reward_config) != ["models"] or not _has_names(models) or not models:
            raise ValueError(
                'reward_config: expected {"models": {NAME: {"weight": 1.0, "sub_reward": {METRIC: WEIGHT}}}}; '
                f"received {config.reward_config}."
            )
        choices = [_read_choice(name, entry, config.remote_reward_url) for name, entry in models.items()]
    if not any(choice.weight * weight for choice in choices for weight in choice.sub_reward.values()):
        raise ValueError(f"reward_weights: expected at least one weight other than 0; received {choices}.")
    return choices


def judge_of(config: RewardConfig) -> RewardConfig | None:
    """Return the reward that judges a guarded run, in the form of one that trains it; None without a guard."""
    guard = config.reward_guard
    return None if guard is None else replace(config, reward_config=guard, reward_guard=None)


def read_requested_judges(config: RewardConfig) -> list[RequestedReward]:
    """Read the rewards that judge a guarded run; none without a guard.

    Raises:
        ValueError: as `read_requested_rewards`, about `reward_guard`.
    """
    judge = judge_of(config)
    with about_the_guard():
        return [] if judge is None else read_requested_rewards(judge)


@contextmanager
def about_the_guard() -> Iterator[None]:
    """Name `reward_guard` in a ValueError about a judge, which is read, checked and built as a reward is."""
    try:
        yield
    except ValueError as error:
        told = re.sub(r"^reward_(model|config|weights)\b", "reward_guard", str(error)).replace(_FLAG, "")
        raise ValueError(told) from error


def loaded_rewards(config: RewardConfig) -> list[RequestedReward]:
    """Return the rewards that a run computes itself, its judge's included; those on a server are left out.

    Raises:
        ValueError: as `read_requested_rewards` and `read_requested_judges`.
    """
    return [one for one in [*read_requested_rewards(config), *read_requested_judges(config)] if one.url is None]


def check_metrics(choice: RequestedReward, metrics: Sequence[str]) -> None:
    """Refuse, by a ValueError that lists what there is, weights for metrics that a reward does not give."""
    if unknown := [metric for metric in choice.sub_reward if metric not in metrics]:
        raise ValueError(
            f"reward_weights: {choice.name} has no metric {', '.join(unknown)}; expected some of {', '.join(metrics)}."
        )


def check_options(name: str, options: Mapping[str, Any], reward: type[RewardModel]) -> None:
    """Refuse, by a ValueError that lists what there is, options that the constructor does not take, or lacks."""
    taken = list(inspect.signature(reward).parameters.values())[1:]
    known = [parameter.name for parameter in taken]
    missing = [p.name for p in taken if p.default is p.empty and p.name not in options]
    unknown = [option for option in options if option not in known]
    if unknown or missing:
        fault = f"takes no option {', '.join(unknown)}" if unknown else f"needs the option {', '.join(missing)}"
        hint = _FLAG if "checkpoint" in missing else ""
        raise ValueError(f"reward_config: {name} {fault}{hint}; its options: {', '.join(known) or 'none'}.")


def _read_choice(name: str, entry: object, url: str | None) -> RequestedReward:
    where = f"reward_config: models.{name}"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: expected a mapping with some of {', '.join(_KEYS)}; received {entry!r}.")
    if unknown := [key for key in entry if key not in _KEYS]:
        raise ValueError(f"{where}: unknown key {', '.join(map(str, unknown))}; expected some of {', '.join(_KEYS)}.")
    options = entry.get("options", {})
    if not _has_names(options):
        raise ValueError(f"{where}.options: expected a mapping of names; received {options!r}.")
    url = _address(f"{where}.url", entry.get("url", url))
    if url is not None and options:
        raise ValueError(f"{where}.options: {name} is scored at {url}; give its options to that server's --reward.")
    weight = _numbers({"weight": entry.get("weight", 1.0)}, where)["weight"]
    sub_reward = _numbers(entry.get("sub_reward"), f"{where}.sub_reward")
    return RequestedReward(name, weight, sub_reward, options, url)


def _has_names(value: object) -> bool:
    """Whether it is a mapping by names; the keys of a YAML file may be numbers."""
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _address(where: str, url: object) -> str | None:
    """Return the address of a server; None for this process.

    Refuse, without repeating it, one with a user or password, which is saved with the run and logged.
    """
    if url is None:
        return None
    try:
        place = urlsplit(url).netloc if isinstance(url, str) else None
    except ValueError:
        place = None
    if place is None:
        raise ValueError(f"{where} is not an address: expected one such as http://10.0.0.5:8000.")
    if "@" in place:
        raise ValueError(
            f"{where} holds a user or password, which config.yaml and logs would show: give the address without it, "
            "and the token in the environment variable REWARD_TOKEN."
        )
    return url


def _numbers(weights: object, where: str) -> dict[str, float]:
    """Return a mapping of names to finite numbers."""
    if not _has_names(weights) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        for value in weights.values()
    ):
        raise ValueError(f"{where}: expected finite weights by name; received {weights!r:.400}.")
    return {name: float(value) for name, value in weights.items()}
