"""Rehearsals that were made before, so that a run which is planned, checked and restarted is rehearsed once."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hyvideo.config.schema import Config, RunConfig
from hyvideo.data.files import replacing
from hyvideo.planning.networks import Networks, encoder_configs
from hyvideo.training.state import code_hash

LIBRARIES = ("torch", "diffusers", "transformers", "peft")


def kept_at(config: Config, networks: Networks, sizes: Mapping[str, Any]) -> Path | None:
    """Return the file that keeps the rehearsal of such a run, by this code and these libraries.

    None where an algorithm or a sampler of the user's own takes part, whose code may change, or without a folder.
    `SAGE_GRPO_CACHE` names the folder, `~/.cache/sage_grpo` by default; empty keeps none.
    """
    folder = os.environ.get("SAGE_GRPO_CACHE", os.path.expanduser("~/.cache/sage_grpo"))
    own = ":" in config.grpo.algorithm + config.rollout.sde_type
    if own or not folder or folder.startswith("~"):  # no home
        return None
    encoders = encoder_configs(Path(config.model.pretrained_model_root), networks.transformer["task_type"])
    data = replace(config.data, train_video_csv=[], valid_video_csv=[])
    settings = asdict(replace(config, data=data, run=RunConfig()))  # nothing in `run` changes what is rehearsed
    decides = [code_hash(), *map(version, LIBRARIES), settings, asdict(networks), repr(encoders), dict(sizes)]
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()
    return Path(folder) / f"rehearsal_{digest[:32]}.json"


def read_kept(path: Path) -> dict[str, Any]:
    """Return the fields of the rehearsal that was kept in a file."""
    return {
        name: {tuple(key) if isinstance(key, list) else key: number for key, number in value["pairs"]}
        if isinstance(value, dict)
        else tuple(value)
        for name, value in json.loads(path.read_text(encoding="utf-8")).items()
    }


def keep(path: Path, found: Mapping[str, Any]) -> None:
    """Keep numbers in a file, whole or not at all; a folder that cannot be written keeps nothing."""
    pairs = {
        name: {"pairs": list(value.items())} if isinstance(value, Mapping) else value for name, value in found.items()
    }
    with suppress(OSError), replacing(path) as unfinished:
        unfinished.write_text(json.dumps(pairs), encoding="utf-8")
