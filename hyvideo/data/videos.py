"""Videos to and from mp4 files, and the images they start from. In memory a video is uint8 [F, H, W, 3], RGB."""

import errno
import io
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import imageio.v2 as imageio
import torch
from imageio.core.format import Format
from imageio_ffmpeg import get_ffmpeg_exe
from PIL import Image, ImageOps

from hyvideo.config.outside import as_value_error, check_file
from hyvideo.data.files import replacing
from hyvideo.data.prompts import Prompt

_POSTER_SIDE = 320  # pixels of its longer side
_EVERY_FRAME_ONCE = ["-fps_mode", "passthrough"]
"""Without it ffmpeg repeats and drops frames where the rate varies."""

_CONTAINERS = "mov,matroska,avi"  # ffmpeg's names: mp4 is one of mov's, webm of matroska's
_LIMITS = ["-format_whitelist", _CONTAINERS, "-protocol_whitelist", "file", "-max_alloc", str(2**27)]
"""Other formats are playlists of other files, whatever the file is called. An index may claim millions of frames in a
few bytes: no single allocation of ffmpeg is larger than 128 MiB, which is a frame of 6,600 x 6,600."""

MAX_VIDEO_BYTES = 4 * 2**30
"""Largest size of one decoded video in bytes: a file of a few kB may hold hours of one colour."""


class VideoTooLargeError(ValueError):
    """A video that would fill the memory when decoded."""


def write_video(path: Path, frames: torch.Tensor, fps: float, crf: int = 16) -> None:
    """Write frames as H.264 that any browser plays. The file appears whole or not at all; its folder is made.

    `path` ends in `.mp4`, and `frames` are uint8 [F, H, W, 3] RGB, H and W even, on any device. `crf` is x264's rate
    factor, from 0 (lossless) to 51; 16 is visually lossless. A ValueError names other frames, and an OSError says that
    the encoder could not finish, for example on a full disk.
    """
    num_frames, height, width, channels = frames.shape
    if frames.dtype != torch.uint8 or channels != 3 or not num_frames:
        raise ValueError(f"Expected frames as uint8 [F, H, W, 3]; received {frames.dtype} {list(frames.shape)}.")
    raw = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {fps} -i -"
    coded = f"-c:v libx264 -pix_fmt yuv420p -crf {crf} -movflags +faststart -y"
    with replacing(path) as temporary, TemporaryFile() as said:
        encoder = [get_ffmpeg_exe(), "-v", "error", *raw.split(), *coded.split(), f"file:{temporary}"]
        pixels = frames.contiguous().cpu().numpy().reshape(-1).data
        # In a process group of its own Ctrl-C does not end it: a run finishes its round first.
        status = subprocess.run(encoder, input=pixels, stderr=said, process_group=0).returncode
        said.seek(0)
        told = said.read(1000).decode(errors="replace").strip()
        if status or told:  # older versions tell of a full disk with status 0
            reason = f"the video encoder ended with status {status} and said {told or 'nothing'}; the disk may be full"
            raise OSError(errno.ENOSPC, reason)


def read_video(path: Path, indices: Sequence[int] | None = None, *, max_bytes: int | None = None) -> torch.Tensor:
    """Frames of a video file as uint8 [F, H, W, 3] RGB on the CPU.

    Args:
        path: the file; a ValueError if there is none, it cannot be decoded as a video or has no such frame.
        indices: which frames, in any order, as often as named; None: all.
        max_bytes: largest size of the frames, else a VideoTooLargeError; None: MAX_VIDEO_BYTES.
    """
    with _opened(path) as reader:
        width, height = reader.get_meta_data()["size"]
        _check_size(path, len(indices or [0]), height, width, max_bytes)
        pixels, places = bytearray(), {}  # one buffer that grows: a list of frames would be copied as a whole
        for index, frame in enumerate(reader):
            if indices is None or index in indices:
                _check_size(path, len(places) + 1, height, width, max_bytes)
                places[index] = len(places)
                pixels += frame.data
                if indices is not None and index == max(indices):
                    break
        frames = torch.frombuffer(pixels, dtype=torch.uint8).view(len(places), height, width, 3)
        chosen = [places[index] for index in (indices or places)]
        return frames if chosen == list(range(len(places))) else frames[chosen]


def poster_of(frame: torch.Tensor) -> bytes:
    """Encode one frame, uint8 [H, W, 3], as a small JPEG: what a page shows in a video's place until it plays."""
    image, encoded = Image.fromarray(frame.cpu().numpy()), io.BytesIO()
    image.thumbnail((_POSTER_SIDE, _POSTER_SIDE))
    image.save(encoded, "JPEG", quality=90)
    return encoded.getvalue()


def video_length(path: Path) -> tuple[int, float]:
    """Number of frames of a video file, and frames per second; errors as of `read_video`."""
    with _opened(path) as reader:
        return reader.count_frames(), reader.get_meta_data()["fps"]


def read_chosen(path: Path, choose: Callable[[int, float], Sequence[int]], *, own: bool = True) -> torch.Tensor:
    """Frames of a video that depend on its length, as `read_video` gives them.

    decord, where it is installed, reads them by their numbers, without decoding the others. It runs in this process and
    reads 8-bit 4:2:0 only, so that other videos, and those of strangers, are read as `read_video` does.

    `choose` gives the indices for the number of frames and the frames per second, and `own` says whether the file was
    made here. Errors are those of `read_video`.
    """
    if own and find_spec("decord"):
        import decord

        decord.logging.set_level(decord.logging.QUIET)  # else it speaks on the console
        with _opened(path) as reader:
            about = reader.get_meta_data()
        expected = round(about["duration"] * about["fps"])
        if about["pix_fmt"].partition("(")[0] == "yuv420p" and not about.get("rotate"):
            with suppress(decord.DECORDError):  # which the other reader puts into words
                frames = decord.VideoReader(str(path), num_threads=1)
                if len(frames) == expected:  # else the file leaves some of its frames out
                    indices = choose(len(frames), frames.get_avg_fps())
                    _check_size(path, len(indices), *frames[0].shape[:2])
                    return torch.from_numpy(frames.get_batch(indices).asnumpy())
    return read_video(path, choose(*video_length(path)))


@contextmanager
def _opened(path: Path) -> Iterator[Format.Reader]:
    """Open a video file; what cannot be read of it is a ValueError that names it."""
    if not path.is_file():
        raise ValueError(f"No video at {path}.")
    try:
        options = {"input_params": _LIMITS, "output_params": _EVERY_FRAME_ONCE}
        with imageio.get_reader(path, format="FFMPEG", **options) as reader:
            yield reader
    except VideoTooLargeError:
        raise
    except (OSError, LookupError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} ({path.stat().st_size} bytes) cannot be decoded as a video.") from error


def _check_size(path: Path, num_frames: int, height: int, width: int, max_bytes: int | None = None) -> None:
    most = MAX_VIDEO_BYTES if max_bytes is None else max_bytes
    if num_frames * height * width * 3 > most:
        raise VideoTooLargeError(
            f"{path} ({path.stat().st_size} bytes) has {num_frames} or more frames of {height}x{width}, over "
            f"{most / 2**30:.3g} GiB when decoded. Shorten it or make it smaller."
        )


_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, Image.DecompressionBombError),
    *(ArithmeticError, AttributeError, LookupError, TypeError, struct.error),  # of a damaged EXIF tag
)
"""What the library raises for damaged images."""


def read_image(path: str) -> Image.Image:
    """Read an image file as RGB, upright: cameras write how they were held. What lets light through lies on white.

    A file that is missing, not an image, damaged, of 16 bits, or larger than Pillow allows is a ValueError.
    """
    with as_value_error(
        f"image '{path}' cannot be read", *_UNREADABLE, advice="Expected a whole PNG, JPEG or WebP file."
    ):
        check_file(path)
        with Image.open(path, formats=("PNG", "JPEG", "WEBP")) as image:  # rarely used ones have a history of bugs
            if image.mode.startswith("I"):
                raise ValueError(f"it has 16 bits per value (mode {image.mode}), which would be cut at 255")
            seen = ImageOps.exif_transpose(image).convert("RGBA" if image.has_transparency_data else "RGB")
            if seen.mode == "RGBA":  # whatever colour lies hidden there
                seen = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
            return seen.convert("RGB")


def check_images(prompts: Sequence[Prompt]) -> None:
    """Raise a ValueError unless every image that `prompts` name can be decoded."""
    for path in dict.fromkeys(prompt.ref_image_path for prompt in prompts if prompt.ref_image_path):
        read_image(path)
