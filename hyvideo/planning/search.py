"""Search for settings that fit: other `sp_size`, larger videos and batches, the least change to a run that does not."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, get_args

from hyvideo.config.schema import Config
from hyvideo.config.settings import SETTINGS, text_of, value_of
from hyvideo.distributed.gpus import Gpu
from hyvideo.distributed.layout import layout_of
from hyvideo.models.parallelize import Recomputed
from hyvideo.planning.assumptions import Assumptions
from hyvideo.planning.memory import FittedPeaks, predict_memory
from hyvideo.planning.networks import read_networks
from hyvideo.planning.plan import GIB, Plan, make_plan
from hyvideo.planning.workload import token_ranks, validation_videos
from hyvideo.training.checks import check_config

SIZES = ("240x432", "352x624", "480x864", "720x1280", "1088x1920")
"""Sizes of videos that are tried, small to large."""

MOST_FRAMES, MOST_ROWS = 481, 64
"""Longest video and largest micro-batch that are tried."""


class Search:
    """Plans variations of one configuration on one kind of GPU."""

    def __init__(self, config: Config, world_size: int, gpu: Gpu, assumptions: Assumptions) -> None:
        self._config = config
        self._world_size = world_size
        self._gpu = gpu
        self._assumptions = assumptions
        self._networks = read_networks(config.model, config.reward)
        self._peaks_of = FittedPeaks()

    def sp_sizes(self) -> list[Plan]:
        """Return the plans of all possible `sp_size`, each with about the configuration's videos per round."""
        sizes = {"world_size": self._world_size, "gpu": self._gpu, "assumptions": self._assumptions}
        variants = (with_settings(self._config, changes) for changes in self._sp_changes(1))
        return [make_plan(variant, **sizes, peaks_of=self._peaks_of) for variant in variants]

    def needed(self, changes: Mapping[str, Any]) -> float:
        """Return the GiB that a GPU must have with some settings changed."""
        config, num_text = with_settings(self._config, changes), self._assumptions.num_text
        sizes = {"world_size": self._world_size, "num_text": num_text, "peaks_of": self._peaks_of}
        peak = predict_memory(config, self._networks, **sizes).peak / GIB
        return peak + self._assumptions.reserved(peak)

    def largest(self, setting: str) -> tuple[Any, float] | None:
        """Return the largest value of a setting that fits, and the GiB it needs; None if no value fits.

        Other settings stay, except that `mini_batch_size_per_update` also sets `rollout_micro_batch_size`, and raises a
        smaller `batch_size`.
        """
        candidates = self._candidates(setting)
        num_fitting = bisect_right(candidates, self._gpu.memory, key=self.needed)  # later ones need more
        if num_fitting == 0:
            return None
        last = candidates[num_fitting - 1]
        return last[setting], self.needed(last)

    def nearest_that_fits(self) -> tuple[dict[str, Any], float] | None:
        """Return the changes that make the run fit at the least cost, and the GiB it then needs; None if none do.

        Changes are added one by one, from harmless to costly: recomputation and smaller batches, idle weights moved off
        the GPU, more ranks per video, shorter videos. After each, smaller validation videos are tried as well.
        """
        changes: dict[str, Any] = {}
        for more in ({}, *self._remedies()):
            changes |= more
            for tried in (changes, changes | self._smaller_validation(changes)):
                if tried and (needed := self.needed(tried)) <= self._gpu.memory:
                    return tried, needed
        return None

    def _smaller_validation(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that make validation videos as large as the rollout's; none without validation."""
        config = with_settings(self._config, changes)
        if not any(validation_videos(config, self._world_size)):
            return {}
        rollout = config.rollout
        return {"validation_fixed_size": rollout.rollout_size, "validate_video_length": rollout.sample_n_frames}

    def _remedies(self) -> Iterator[dict[str, Any]]:
        config = self._config
        levels, recomputed = ("none", *get_args(Recomputed)[::-1]), config.parallel.activation_checkpointing
        wanted = [
            ("enable_fsdp", self._world_size > 1 or config.parallel.enable_fsdp),
            *(("activation_checkpointing", level) for level in levels[levels.index(recomputed) :]),
            ("reshard_after_forward", True),
            ("mini_batch_size_per_update", 1),
            ("rollout_micro_batch_size", 1),
        ]
        resting = config.parallel.offload
        for word in ("anchor", "reward", "encoders"):
            resting = resting + [word] * (word not in resting)
            wanted.append(("offload", resting))
        if self._world_size == 1:  # more GPUs would rather hold a part of the weights each
            wanted += [("enable_fsdp", True), ("offload", resting + ["weights"] * ("weights" not in resting))]
        for name, value in wanted:
            if value_of(config, name) != value:
                yield {name: value}
        yield from self._sp_changes(config.parallel.sp_size + 1)
        for frames in range((config.rollout.sample_n_frames - 2) // 20 * 20 + 1, 20, -20):  # multiples of 20, and 1
            yield {"sample_n_frames": frames}

    def _sp_changes(self, least: int) -> Iterator[dict[str, Any]]:
        """Yield each `sp_size` that one machine allows, with the `batch_size` that keeps the videos of a round.

        Where no `batch_size` keeps their number, the next larger number is taken.
        """
        config, ranks = self._config, self._world_size
        heads = self._networks.transformer["num_attention_heads"]
        videos = config.grpo.batch_size * layout_of(config, ranks).dp_size
        for sp_size in range(least, self._assumptions.gpus_per_node + 1):
            if ranks % sp_size or heads % token_ranks(with_settings(config, {"sp_size": sp_size})):
                continue
            first = max(1, videos * sp_size // ranks)
            for batch_size in range(first, first + config.grpo.num_generations + 1):
                changes = {"sp_size": sp_size, "batch_size": batch_size, "dp_replicate": 1}
                if _can_run(with_settings(config, changes), ranks):
                    yield changes
                    break

    def _candidates(self, setting: str) -> list[dict[str, Any]]:
        """Return the values of a setting to try, small to large, each with the settings that change with it."""
        if setting == "sample_n_frames":
            return [{setting: frames} for frames in range(5, MOST_FRAMES + 1, 4)]
        if setting == "rollout_size":
            return [{setting: size} for size in SIZES]
        group = self._config.grpo.num_generations
        together = ("mini_batch_size_per_update", "rollout_micro_batch_size")
        return [
            dict.fromkeys(together, rows)
            | {"batch_size": max(self._config.grpo.batch_size, math.ceil(rows / group) * group)}
            for rows in range(1, MOST_ROWS + 1)
        ]


def misfit(plan: Plan, search: Search) -> str:
    """Return a message that a plan does not fit, with the nearest settings that do."""
    said = (
        f"the run needs {plan.needed:.1f} GiB per GPU ({plan.reserved:.1f} of them in reserve), but "
        f"{plan.gpu.name} has {plan.gpu.memory:g}."
    )
    found = search.nearest_that_fits()
    if found is None:
        return f"{said} No change of its settings that was tried fits: use more GPUs, larger ones, or use_lora."
    changes, needed = found
    flags = " ".join(f"--{name} {text_of(value)}" for name, value in changes.items())
    return f"{said} The nearest that fits, with {needed:.1f} GiB: {flags}"


def with_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of the configuration with some settings changed."""
    changed = deepcopy(config)
    for name, value in changes.items():
        setattr(getattr(changed, SETTINGS[name].group), name, value)
    return changed


def _can_run(config: Config, world_size: int) -> bool:
    try:
        check_config(config, world_size, files=False)
    except ValueError:
        return False
    return True
