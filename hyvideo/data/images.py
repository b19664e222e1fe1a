"""First frames of image-to-video, read from files: a damaged one is named before anything is computed."""

import struct
from collections.abc import Sequence

from PIL import Image, ImageOps

from hyvideo.config.outside import as_value_error, check_file
from hyvideo.data.prompts import Prompt

_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, Image.DecompressionBombError),
    *(ArithmeticError, AttributeError, LookupError, TypeError, struct.error),  # of a damaged EXIF tag
)
"""What the library raises for damaged files."""


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
