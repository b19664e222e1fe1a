"""Sizes of videos and of the images they start from, as the original pipeline chooses them."""

from diffusers.pipelines.hunyuan_video1_5.image_processor import generate_crop_size_list
from PIL import Image


def bucket_size(target_size: int, factor: int, *, width: int, height: int) -> tuple[int, int]:
    """Return the (height, width) in which the model makes videos of the aspect ratio `width : height`.

    Of all sizes with about `target_size` squared pixels (the transformer's: 640 for 480p, 960 for 720p), in multiples
    of `factor` (the VAE's spatial compression), it is the one of the nearest ratio. (diffusers searches on one side of
    the ratio alone, and picks another size for some.) `bucket_size(640, 16, width=16, height=9)` is `(480, 848)`. A
    side that is not positive is a ValueError.
    """
    if min(width, height) < 1:
        raise ValueError(f"An aspect ratio is WIDTH:HEIGHT with positive whole numbers; received {width}:{height}.")
    sizes = generate_crop_size_list(target_size, factor)
    return min(sizes, key=lambda size: abs(round(size[0] / size[1], 5) - height / width))


def check_video_shape(num_frames: int, size: tuple[int, int], *, temporal: int, spatial: int) -> None:
    """Refuse, by a ValueError, all but `temporal` n + 1 frames with sides that are multiples of `spatial` pixels."""
    fewer = max(num_frames - 1, 0) // temporal * temporal + 1
    advice = "" if num_frames == fewer else f": take {fewer} or {fewer + temporal} frames"
    if advice or any(side < spatial or side % spatial for side in size):
        raise ValueError(
            f"A video must have {temporal} n + 1 frames, and sides that are multiples of {spatial} pixels; "
            f"received {num_frames} frames of {size[0]}x{size[1]}{advice}."
        )


def crop_to_size(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale `image` until it covers `size` (height, width) and crop its centre."""
    height, width = size
    scale = max(width / image.width, height / image.height)
    scaled = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    left, top = round((scaled.width - width) / 2), round((scaled.height - height) / 2)
    return scaled.crop((left, top, left + width, top + height))
