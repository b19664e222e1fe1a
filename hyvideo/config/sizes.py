"""Sizes of videos as a configuration writes them."""

import re


def parse_size(text: str) -> tuple[int, int]:
    """Read a size such as `352x624`, or `352*624` as the reference takes it too, as (height, width) in pixels.

    Raises:
        ValueError: the text is not HEIGHTxWIDTH with positive whole numbers.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,4})[x*]([1-9][0-9]{0,4})", text)
    if match is None:
        raise ValueError(f"a size is HEIGHTxWIDTH in pixels, such as 352x624; received {text!r}")
    return int(match[1]), int(match[2])
