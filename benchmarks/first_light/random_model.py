"""A model folder whose transformer has the released sizes and random weights, between the bundled model's small parts.

Everything else is real: the run reads it from disk, shards it and trains it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn

from benchmarks.paired import device
from hyvideo.planning.networks import made_in

BUNDLED = Path(__file__).parents[2] / "assets" / "tiny"

REAL_TRUNK = {
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "patch_size": 1,
    "rope_axes_dim": [16, 56, 56],
}
"""Where the released transformer is larger than the bundled one; channels and widths of text stay the bundled ones."""

SMALL_TRUNK = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "num_layers": 2,
    "patch_size": 1,
    "rope_axes_dim": [8, 12, 12],
}

STD = 0.02
"""Of the weights; norms start at 1 and biases at 0."""


def write_random_model(folder: Path, *, small: bool) -> Path:
    """Write the folder, unless it is there; 16 GB with the released sizes. Return it."""
    if (folder / "model_index.json").is_file():
        return folder
    shutil.copytree(BUNDLED, folder, ignore=shutil.ignore_patterns("transformer", "model_index.json"))
    config: dict[str, Any] = json.loads((BUNDLED / "transformer" / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    with device(), made_in(torch.float32 if small else torch.bfloat16), torch.no_grad():
        transformer = HunyuanVideo15Transformer3DModel.from_config(config | (SMALL_TRUNK if small else REAL_TRUNK))
        for module in transformer.modules():
            for name, weight in module.named_parameters(recurse=False):
                if name == "bias":
                    nn.init.zeros_(weight)
                elif weight.ndim == 1:
                    nn.init.ones_(weight)
                else:
                    nn.init.normal_(weight, std=STD)
    transformer.save_pretrained(folder / "transformer", max_shard_size="4GB")
    shutil.copy(BUNDLED / "model_index.json", folder)  # last: the folder is whole
    return folder
