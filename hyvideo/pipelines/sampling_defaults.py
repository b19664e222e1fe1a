"""How a model is meant to be sampled when the user does not say."""

import json
from pathlib import Path
from typing import Any

FILE = "sampling_defaults.json"

HUNYUAN_480P_T2V = {
    "num_inference_steps": 50,
    "guidance_scale": 6.0,
    "shift": 5.0,
    "fixed_size": "480x848",
    "video_length": 121,
}
"""HunyuanVideo-1.5, 480p text to video, as its authors sample it."""


def sampling_defaults(root: str | Path) -> dict[str, Any]:
    """Return steps, guidance, shift, size and length for the model in `root`: its own file, else `HUNYUAN_480P_T2V`.

    Raises:
        ValueError: the model's file lacks a setting or has an unknown one.
    """
    path = Path(root) / FILE
    if not path.is_file():
        return dict(HUNYUAN_480P_T2V)
    defaults = json.loads(path.read_text())
    if set(defaults) != set(HUNYUAN_480P_T2V):
        raise ValueError(f"'{path}': expected exactly {sorted(HUNYUAN_480P_T2V)}; received {sorted(defaults)}.")
    return defaults
