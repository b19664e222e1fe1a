"""Videos to and from mp4 files. In memory a video is a uint8 tensor [F, H, W, 3], RGB."""

from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import torch
from imageio_ffmpeg import count_frames_and_secs

from hyvideo.data.files import replacing

# x264: 16 is visually lossless, so a reward that reads the file sees what the policy made.
_CONSTANT_RATE_FACTOR = 16

MAX_VIDEO_BYTES = 4 * 2**30
"""Largest size of one decoded video in bytes: a file of a few kB may hold hours of one colour."""


class VideoTooLargeError(ValueError):
    """A video that would fill the memory when decoded."""


def write_video(path: Path, frames: torch.Tensor, fps: float) -> None:
    """Write frames as H.264 that any browser plays. The file appears whole or not at all; its folder is made.

    Args:
        path: target, ending in `.mp4`.
        frames: uint8 [F, H, W, 3] RGB, H and W even, on any device; kept at exactly this size.
        fps: frames per second.

    Raises:
        ValueError: frames of another type or shape, an odd size, another file extension.
        OSError: the encoder could not finish, for example on a full disk.
    """
    path = Path(path)
    _check_frames(frames)
    if path.suffix != ".mp4":
        raise ValueError(f"Videos are written as .mp4, received the path {path}.")
    with replacing(path) as temporary:
        _encode(temporary, frames, fps)


def read_video(path: Path) -> torch.Tensor:
    """All frames of a video file of constant frame rate as uint8 [F, H, W, 3] RGB on the CPU.

    Read through ffmpeg, not decord, whose whole-batch read fails at widths of 16, 24, 48 and 72.

    Raises:
        ValueError: there is no file, it is not a video that can be decoded, or its frames are more than
            MAX_VIDEO_BYTES.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"No video at {path}.")
    try:
        with imageio.get_reader(path, format="FFMPEG") as reader:
            width, height = reader.get_meta_data()["size"]
            check_video_size(path, 1, height, width)
            frames = []
            for frame in reader:
                check_video_size(path, len(frames) + 1, height, width)
                frames.append(frame)
            return torch.from_numpy(np.stack(frames))
    except VideoTooLargeError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} ({path.stat().st_size} bytes) cannot be decoded as a video.") from error


def check_video_size(path: Path, num_frames: int, height: int, width: int) -> None:
    """Raise a VideoTooLargeError if that many frames exceed MAX_VIDEO_BYTES."""
    if num_frames * height * width * 3 > MAX_VIDEO_BYTES:
        raise VideoTooLargeError(
            f"{path} ({path.stat().st_size} bytes) has {num_frames} or more frames of {height}x{width}, over "
            f"{MAX_VIDEO_BYTES / 2**30:.3g} GiB when decoded. Shorten it or make it smaller."
        )


def _encode(path: Path, frames: torch.Tensor, fps: float) -> None:
    """Run the encoder and make sure that it finished: it reports no failure at its end."""
    options = ["-crf", str(_CONSTANT_RATE_FACTOR), "-movflags", "+faststart"]
    with imageio.get_writer(
        path, fps=fps, codec="libx264", quality=None, pixelformat="yuv420p", macro_block_size=2, output_params=options
    ) as writer:
        for frame in frames.cpu().numpy():
            writer.append_data(frame)
    num_written, _ = count_frames_and_secs(path)
    if num_written != len(frames):
        raise OSError(f"The encoder wrote {num_written} of {len(frames)} frames to {path.parent}: is the disk full?")


def _check_frames(frames: torch.Tensor) -> None:
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"Expected uint8 frames [F, H, W, 3], received {frames.dtype} {list(frames.shape)}.")
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise ValueError(f"H.264 with 4:2:0 colour needs even sizes, received {height}x{width} (HxW).")
