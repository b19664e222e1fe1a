"""What a reward is, and the registry of their names. Every file beside this one that registers a reward is found."""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hyvideo.config.outside import complain, import_class
from hyvideo.config.settings import nearest
from hyvideo.models import reward_models
from hyvideo.models.model_folder import readable
from hyvideo.models.weight_files import DTYPES, SafetensorsFolder

Videos = Tensor | Sequence[Path]
"""B videos: uint8 `[B, F, H, W, 3]` in memory, or mp4 files."""


class RewardFailureError(RuntimeError):
    """Videos cannot be scored, and training must not go on as if they were."""


@dataclass(frozen=True)
class RewardContext:
    """What a run tells every reward it builds.

    Attributes:
        device: where networks run.
        model_root: folder of the base model, in which the reward weights of the original layout lie.
        video_fps: frames per second of videos that come in memory.
        batch_size: videos that run through a network together.
        own_files: whether video files were made here; a server's come from others.
        prompt_csvs: CSV files of the prompts, for a reward that reads a column of its own there.
        timeout: seconds that a request to a server may take.
        retries: times that a failed request is sent again.
        in_flight: requests open at the same time.
    """

    device: torch.device | str = "cpu"
    model_root: Path = Path("ckpts")
    video_fps: float = 24
    batch_size: int = 8
    own_files: bool = True
    prompt_csvs: Sequence[str] = ()
    timeout: float = 300.0
    retries: int = 3
    in_flight: int = 4

    def dtype_name(self, reward: str, chosen: str | None) -> str:
        """Return the key of DTYPES that was chosen, or a ValueError; for None `bf16` on a GPU, `fp32` on the CPU."""
        if chosen is not None and chosen not in DTYPES:
            raise ValueError(f"{reward}: expected dtype {' or '.join(DTYPES)}, received {chosen!r}.")
        return chosen or ("fp32" if torch.device(self.device).type == "cpu" else "bf16")


def pretrained(kind: type, checkpoint: str, reward: str, dtype: torch.dtype) -> Any:
    """Load a network of the transformers library from a folder, all weights or a ValueError that names the reward."""
    with readable(Path(checkpoint), f"the model for {reward}"):
        SafetensorsFolder(Path(checkpoint))  # the library would convert quantized weights without a word
        options = {"dtype": dtype, "output_loading_info": True, "use_safetensors": True}
        network, report = kind.from_pretrained(checkpoint, **options, local_files_only=True, trust_remote_code=False)
    if report["missing_keys"]:  # the library would draw them at random
        listed = ", ".join(sorted(report["missing_keys"])[:3])
        raise ValueError(f"{reward}: '{checkpoint}' lacks weights: {listed}, ...")
    return network


class RewardModel(ABC):
    """Scores videos for their prompts; subclass it and decorate with `register_reward`.

    Keyword arguments of a subclass's constructor, after the context, are its options in `reward_config`.

    Attributes:
        metrics: names of its scores; more is better.
        reads: `file` for a reward that is defined on mp4 files: it gets paths, or frames with `reward_io: memory`.
            `memory` for one that always gets frames.
    """

    metrics: ClassVar[Sequence[str]]
    reads: Literal["memory", "file"] = "memory"

    def __init__(self, context: RewardContext = RewardContext()) -> None:
        self.context = context

    @classmethod  # noqa: B027 - most have nothing to check
    def check(cls, context: RewardContext, **options: object) -> None:
        """Refuse, without loading, what the constructor would refuse by a ValueError; most check nothing."""

    @abstractmethod
    def __call__(self, videos: Videos, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Score B videos for their B prompts: each metric `[B]`, NaN for an item that failed."""

    def applies(self, prompt: str) -> bool:
        """Whether the reward can judge videos of this prompt at all; where not, its NaN is no failure."""
        return True

    def to(self, device: torch.device | str) -> None:  # noqa: B027 - most measures have no networks
        """Move networks to `device`; a reward without any has nothing to move."""

    def describe(self) -> str:
        """Say in a few words how it scores, for the log."""
        return ", ".join(self.metrics)


def checked_answer(name: str, reward: RewardModel, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
    """Score B videos: each of the reward's metrics `[B]` float32 on the CPU, NaN for infinity.

    A metric that is missing, no tensor, of another shape or complex is a ValueError that names the reward. A reward
    that ends the program is a RuntimeError: what asked it would end too, as if all were well.
    """
    try:
        scores = reward(videos, prompts)
    except SystemExit as error:
        told = RuntimeError(f"the reward {name} called exit({error.code!r}): let it raise what is wrong instead")
        raise told.with_traceback(error.__traceback__) from None
    try:
        found = {metric: torch.as_tensor(scores[metric]).detach() for metric in reward.metrics}
        fits = all(values.shape == (len(prompts),) and not values.is_complex() for values in found.values())
    except (KeyError, TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise ValueError(
            f"The reward {name} must give {', '.join(reward.metrics)} as [{len(prompts)}] real numbers, one per video; "
            f"it gave {scores!r:.300}."
        )
    found = {metric: values.float().cpu() for metric, values in found.items()}
    return {metric: torch.where(values.isinf(), torch.nan, values) for metric, values in found.items()}


_REWARDS: dict[str, type[RewardModel]] = {}


def register_reward(name: str) -> Callable[[type[RewardModel]], type[RewardModel]]:
    """Register a subclass of RewardModel as `reward_model: name`, which must be free (docs/rewards.md shows one)."""

    def register(reward: type[RewardModel]) -> type[RewardModel]:
        """Put the class into the registry, unchanged."""
        if name in _REWARDS:
            raise ValueError(f"register_reward: '{name}' is {_REWARDS[name].__qualname__} already.")
        _REWARDS[name] = reward
        return reward

    return register


def reward_class(name: str, setting: str) -> type[RewardModel]:
    """Return the reward of a name, or of the import path `module:Class`; a ValueError lists those there are."""
    if ":" in name:
        return import_class(setting, name, RewardModel)
    known = registered_rewards()
    if name not in known:
        raise ValueError(
            f"{setting}: no reward named '{name}' is available; expected one of {', '.join(known)}, or module:Class "
            f"of your own. Nearest: {nearest(name, known)}."
        )
    return known[name]


def registered_rewards() -> Mapping[str, type[RewardModel]]:
    """Import every module of this package and return the rewards by name; of one that cannot be, say why."""
    for module in pkgutil.iter_modules(reward_models.__path__):
        name = f"{reward_models.__name__}.{module.name}"
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            for reward in [reward for reward, owner in _REWARDS.items() if owner.__module__ == name]:
                del _REWARDS[reward]
            file = str(Path(module.module_finder.path) / module.name) + ("" if module.ispkg else ".py")
            complain(f"WARNING: rewards in {file} are skipped, because it cannot be imported: {error!r}", once=True)
    return dict(sorted(_REWARDS.items()))
