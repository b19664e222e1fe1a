"""Which configurations train the same thing: the fields that decide the result, and their hash."""

import hashlib
import json

from omegaconf import OmegaConf

from hyvideo.config.knobs import KNOBS
from hyvideo.config.schema import Config

_SILENT_GROUPS = {"validation", "parallel"}
"""Watching does not change training, and a run may be resumed on other ranks."""

_SILENT_FIELDS = {
    "output_dir",
    "run_name",
    "run_tags",
    "trackers",
    "max_steps",
    "save_interval",
    "log_interval",
    "keep_last",
    "keep_every",
    "nonfinite_update",
    "max_skipped_updates",
    "image_root",
    "async_save",
    "profile",
    "profile_steps",
    "peak_tflops",
    "resume_from_checkpoint",
    "resume_may_change",
    "dry_run",
    "save_rollout_videos",
    "valid_video_csv",
    "remote_reward_url",
    "remote_reward_timeout",
    "remote_reward_retries",
    "remote_reward_in_flight",
    "reward_async",
    "reward_offload",
    "reward_max_failed",
    "reference_mode_offload",
    "enable_gradient_checkpointing",
}
"""Where the run writes and runs, how long, how memory is used, and how much failure it tolerates."""


def settings_of(cfg: Config) -> dict[str, object]:
    """Name -> value of every setting, in plain types."""
    groups = OmegaConf.to_container(OmegaConf.structured(cfg))
    return {name: value for group in groups.values() for name, value in group.items()}


def deciding_fields(cfg: Config, dp_size: int = 1) -> dict[str, object]:
    """Name -> value of every field that decides the trained weights.

    Runs that agree in all of them may continue each other; where they do not, these are the values to show.

    Args:
        cfg: the configuration.
        dp_size: data-parallel ranks; `batch_size` is given for all of them together, so that a run may continue on
            another number of ranks as long as its rollouts have as many videos.
    """
    values = settings_of(cfg)
    values["batch_size"] *= dp_size
    return {
        name: values[name]
        for name, knob in KNOBS.items()
        if knob.group not in _SILENT_GROUPS and name not in _SILENT_FIELDS
    }


def config_hash(cfg: Config, dp_size: int = 1) -> str:
    """16 hexadecimal digits over `deciding_fields`, the same on every machine and for any order of files and flags."""
    text = json.dumps(deciding_fields(cfg, dp_size), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
