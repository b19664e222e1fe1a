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
        ValueError: the model's file is not JSON, lacks a setting or has an unknown one.
    """
    path = Path(root) / FILE
    if not path.is_file():
        return dict(HUNYUAN_480P_T2V)
    try:
        defaults = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"'{path}' is not JSON: {error}") from error
    if not isinstance(defaults, dict) or set(defaults) != set(HUNYUAN_480P_T2V):
        raise ValueError(f"'{path}': expected exactly {sorted(HUNYUAN_480P_T2V)}; received {defaults}.")
    return defaults
