"""Which frames of a video the network sees, at which size, and cut into which patches."""

from functools import partial
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from hyvideo.data.videos import read_chosen

PATCH, TEMPORAL_PATCH, MERGE = 14, 2, 2
MIN_PIXELS = 128 * 28 * 28
"""Smaller frames are enlarged to at least this many pixels."""

_MIN_FRAMES, _MAX_FRAMES = 4, 768
_FRAMES_AT_ONCE = 16  # that are float32 in their full size, which takes four times the memory of the file's frames
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


def frame_indices(total: int, video_fps: float, *, fps: float, num_frames: int | None = None) -> list[int]:
    """Choose an even number of frames spread over the whole of a video with `total` frames, `video_fps` per second.

    Args:
        total: at least 1.
        video_fps: of the video.
        fps: frames wanted per second of video; at least 4 frames, if the video has them.
        num_frames: frames wanted in all, instead of `fps`; rounded to even, at least 2 (else a ValueError). Of a
            shorter video all frames are shown, the last one twice where their number is odd, as in the original.
    """
    if num_frames is not None:
        count = round(num_frames / TEMPORAL_PATCH) * TEMPORAL_PATCH
        if count < TEMPORAL_PATCH:
            raise ValueError(f"VideoAlign: num_frames is {num_frames}, but must be even and at least 2.")
        if count > total:
            return [*range(total), *[total - 1] * (total % TEMPORAL_PATCH)]
    else:
        most = min(_MAX_FRAMES, total) // TEMPORAL_PATCH * TEMPORAL_PATCH
        wanted = min(max(total / video_fps * fps, _MIN_FRAMES), most)
        count = max(TEMPORAL_PATCH, round(wanted / TEMPORAL_PATCH) * TEMPORAL_PATCH)
    return torch.linspace(0, total - 1, count).round().long().tolist()


def read_frames(path: Path, *, fps: float, num_frames: int | None, own: bool = True) -> Tensor:
    """Read the shown frames of a file, uint8 `[N, H, W, 3]`; a damaged or too large one is a ValueError.

    `own` as in `read_chosen`.
    """
    return read_chosen(path, partial(frame_indices, fps=fps, num_frames=num_frames), own=own)


def patches(frames: Tensor, max_pixels: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Resize, normalise and cut uint8 frames `[N, H, W, 3]`, N even, as the vision tower takes them.

    Height and width become multiples of 28 with MIN_PIXELS to `max_pixels` pixels; sides of a ratio beyond 200 are a
    ValueError.

    Returns:
        Patches `[T h w, 3 * 2 * 14 * 14]` float32, grouped by 2x2 neighbours, and their grid (T, h, w).
    """
    height, width = smart_resize(*frames.shape[1:3], PATCH * MERGE, MIN_PIXELS, max_pixels)
    parts = frames.permute(0, 3, 1, 2).split(_FRAMES_AT_ONCE)
    resized = [interpolate(part.float(), (height, width), mode="bicubic", antialias=True) for part in parts]
    pixels = torch.cat(resized).clamp(0, 255).round() / 255
    pixels = (pixels - torch.tensor(_MEAN).view(3, 1, 1)) / torch.tensor(_STD).view(3, 1, 1)
    grid = (len(frames) // TEMPORAL_PATCH, height // PATCH, width // PATCH)
    pattern = "(T t) c (h a p) (w b q) -> (T h w a b) (c t p q)"  # a, b: place among the 2x2 neighbours
    return rearrange(pixels, pattern, t=TEMPORAL_PATCH, a=MERGE, b=MERGE, p=PATCH, q=PATCH), grid
