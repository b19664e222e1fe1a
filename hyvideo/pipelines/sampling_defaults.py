"""How a model is meant to be sampled when the user does not say."""

from pathlib import Path
from typing import Any

from diffusers.pipelines.hunyuan_video1_5.image_processor import generate_crop_size_list

from hyvideo.models.conversion import RESOLUTIONS
from hyvideo.models.model_folder import is_diffusers_layout, read_json, transformer_folder

FILE = "sampling_defaults.json"

HUNYUAN_480P_T2V = {
    "num_inference_steps": 50,
    "guidance_scale": 6.0,
    "shift": 5.0,
    "fixed_size": "480x848",
    "video_length": 121,
}
"""HunyuanVideo-1.5, 480p text to video, as its authors sample it; the other versions differ from it."""

SHIFTS = {("480p", "t2v"): 5.0, ("480p", "i2v"): 5.0, ("720p", "t2v"): 9.0, ("720p", "i2v"): 7.0}
STEP_DISTILLED = {"num_inference_steps": 12, "guidance_scale": 1.0, "shift": 7.0}


def sampling_defaults(root: str | Path, version: str | None = None) -> dict[str, Any]:
    """Return steps, guidance, shift, size (16:9) and length for a model, by the names of `HUNYUAN_480P_T2V`.

    They come from the model's own `sampling_defaults.json` (the tiny base has one), else in the original layout from
    the authors' table for the version (one whose name says `distilled` is sampled unguided), else in the diffusers
    layout from its scheduler and guider. A missing model, or a file that is not these settings, is a ValueError.
    """
    root = Path(root)
    path = root / FILE
    if path.is_file():
        defaults = read_json(path)
        if set(defaults) != set(HUNYUAN_480P_T2V):
            raise ValueError(f"'{path}': expected exactly {sorted(HUNYUAN_480P_T2V)}; received {defaults}.")
        return defaults
    folder = transformer_folder(root, version)
    config = read_json(folder / "config.json")
    if is_diffusers_layout(root):
        defaults = HUNYUAN_480P_T2V | {"fixed_size": _widescreen(config.get("target_size", 640))}
        if config.get("use_meanflow"):
            defaults |= STEP_DISTILLED
        for name, part in (("shift", "scheduler"), ("guidance_scale", "guider")):
            file = root / part / f"{part}_config.json"
            if file.is_file() and name in (settings := read_json(file)):
                defaults[name] = settings[name]
        return defaults
    resolution, task = config.get("ideal_resolution"), config.get("ideal_task")
    if (resolution, task) not in SHIFTS:
        raise ValueError(
            f"'{folder / 'config.json'}': there are sampling defaults for "
            f"{', '.join(' '.join(key) for key in SHIFTS)}; received {resolution!r} {task!r}."
        )
    own = {"shift": SHIFTS[resolution, task], "fixed_size": _widescreen(RESOLUTIONS[resolution])}
    if config.get("use_meanflow"):
        return HUNYUAN_480P_T2V | own | STEP_DISTILLED
    return HUNYUAN_480P_T2V | own | ({"guidance_scale": 1.0} if "distilled" in folder.name else {})


def _widescreen(target_size: int) -> str:
    height, width = bucket_size(target_size, 16, width=16, height=9)
    return f"{height}x{width}"


def bucket_size(target_size: int, factor: int, *, width: int, height: int) -> tuple[int, int]:
    """Return the (height, width) in which the model makes videos of the aspect ratio `width : height`.

    Of all sizes with about `target_size` squared pixels (the transformer's: 640 for 480p, 960 for 720p), in multiples
    of `factor` (the VAE's spatial compression), it is the one of the nearest ratio. (diffusers searches on one side of
    the ratio alone, and picks another size for some.) `bucket_size(640, 16, width=16, height=9)` is `(480, 848)`.
    """
    sizes = generate_crop_size_list(target_size, factor)
    return min(sizes, key=lambda size: abs(round(size[0] / size[1], 5) - height / width))
