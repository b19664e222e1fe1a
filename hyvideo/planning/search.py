"""Search for settings that fit: other `sp_size`, and the least change to a run that does not."""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, get_args

from hyvideo.config.schema import Config
from hyvideo.config.settings import SETTINGS, text_of, value_of
from hyvideo.distributed.gpus import Gpu
from hyvideo.distributed.mesh import layout_of
from hyvideo.models.parallelize import Recomputed
from hyvideo.planning.assumptions import Assumptions
from hyvideo.planning.plan import Plan, make_plan


@dataclass(frozen=True)
class Search:
    """Plans variations of one configuration on one kind of GPU; `tell` is called with a line for each plan."""

    config: Config
    world_size: int
    gpu: Gpu
    assumptions: Assumptions
    tell: Callable[[str], None]

    def plan(self, changes: Mapping[str, Any]) -> Plan | None:
        """Plan the run with some settings changed; None where it cannot run with them."""
        config, said = with_settings(self.config, changes), flags_of(changes)
        try:
            plan = make_plan(config, world_size=self.world_size, gpu=self.gpu, assumptions=self.assumptions)
        except ValueError:
            self.tell(f"{said}: cannot run")
            return None
        self.tell(f"{said}: {plan.needed:.1f} GiB, {'fits' if plan.fits else 'does not fit'}")
        return plan

    def sp_sizes(self) -> list[Plan]:
        """Return the plans of all possible `sp_size`, each with about the configuration's videos per round."""
        tried = (self.plan(self._sp_changes(size)) for size in range(1, self.assumptions.gpus_per_node + 1))
        return [plan for plan in tried if plan]

    def nearest_that_fits(self) -> tuple[dict[str, Any], float] | None:
        """Return the changes that make the run fit at the least cost, and the GiB it then needs; None if none do.

        Changes are added one by one, from harmless to costly: recomputation and smaller batches, idle weights moved off
        the GPU, more ranks per video, shorter videos. Validation videos become as large as the rollout's where they
        take most.
        """
        changes: dict[str, Any] = {}
        for more in self._remedies():
            plan = self.plan(changes | more)
            if plan is None:
                continue
            changes |= more
            if not plan.fits and plan.rehearsal.peaks.get("validation") == plan.rehearsal.peak:
                rollout = with_settings(self.config, changes).rollout
                changes |= {"validation_fixed_size": rollout.rollout_size}
                changes |= {"validate_video_length": rollout.sample_n_frames}
                plan = self.plan(changes)
            if plan.fits:
                return changes, plan.needed
        return None

    def _remedies(self) -> Iterator[dict[str, Any]]:
        config = self.config
        levels, recomputed = ("none", *get_args(Recomputed)[::-1]), config.parallel.activation_checkpointing
        wanted = [
            ("enable_fsdp", self.world_size > 1 or config.parallel.enable_fsdp),
            *(("activation_checkpointing", level) for level in levels[levels.index(recomputed) :]),
            ("reshard_after_forward", True),
            ("mini_batch_size_per_update", 1),
            ("rollout_micro_batch_size", 1),
        ]
        resting = config.parallel.offload
        for word in ("anchor", "reward", "encoders"):
            resting = resting + [word] * (word not in resting)
            wanted.append(("offload", resting))
        if self.world_size == 1:  # more GPUs would rather hold a part of the weights each
            wanted += [("enable_fsdp", True), ("offload", resting + ["weights"] * ("weights" not in resting))]
        yield from ({name: value} for name, value in wanted if value_of(config, name) != value)
        for sp_size in range(config.parallel.sp_size + 1, self.assumptions.gpus_per_node + 1):
            yield self._sp_changes(sp_size)
        for frames in range((config.rollout.sample_n_frames - 2) // 20 * 20 + 1, 20, -20):  # multiples of 20, and 1
            yield {"sample_n_frames": frames}

    def _sp_changes(self, sp_size: int) -> dict[str, Any]:
        """Return an `sp_size` with the `batch_size` that keeps the videos of a round, or makes them a few more."""
        grpo, videos = self.config.grpo, layout_of(self.config, self.world_size).num_videos
        rollouts, ranks = grpo.gradient_accumulation_steps, max(1, self.world_size // sp_size)
        batch, group = math.ceil(videos / rollouts / ranks), grpo.num_generations
        while not (batch % group == 0 or group % batch == 0) or batch * ranks % group:
            batch += 1
        return {"sp_size": sp_size, "batch_size": batch, "dp_replicate": 1}


def flags_of(changes: Mapping[str, Any]) -> str:
    """Return changed settings as one would type them."""
    return " ".join(f"--{name} {text_of(value)}" for name, value in changes.items())


def with_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of the configuration with some settings changed."""
    changed = deepcopy(config)
    for name, value in changes.items():
        setattr(getattr(changed, SETTINGS[name].group), name, value)
    return changed
