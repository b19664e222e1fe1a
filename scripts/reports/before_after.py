"""Before and after, side by side: the same prompts and seeds from two models, as one mp4 and one contact sheet."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from hyvideo.data.files import replacing
from hyvideo.data.videos import write_video

BEFORE_AFTER = "before_after.mp4"
"""What the demo writes to its run folder."""

_SHOWN_SIZE = 192  # a video smaller than this is enlarged by a whole factor
_GAP, _FRAME_GAP = 12, 2
_LINE_HEIGHT, _CAPTION_LINES = 18, 2
_HEADER_HEIGHT = (_CAPTION_LINES + 1) * _LINE_HEIGHT  # the caption, then the two titles
_SHEET_FRAMES = 5
_FPS = 24
_TITLES = ("before", "after")  # of the left and the right video of each pair
_PAPER = 228
_INK, _PALE_INK = (20, 20, 20), (110, 110, 110)


def side_by_side(before: torch.Tensor, after: torch.Tensor, captions: Sequence[str], path: Path) -> Path:
    """Write a grid of captioned video pairs to `path` (mp4), and frames spread over each video to a png beside it.

    `before` and `after` are uint8 [N, F, H, W, 3], of N prompts and seeds; captions are cut where they do not fit. The
    contact sheet, whose path is returned, has one pair per row.

    Raises:
        ValueError: the shapes differ, or there is not one caption per pair.
    """
    if before.dim() != 5 or before.shape != after.shape or len(captions) != len(before):
        raise ValueError(
            "Expected N captions and two stacks of videos of one shape [N, F, H, W, 3], "
            f"received {len(captions)} captions, {list(before.shape)} and {list(after.shape)}."
        )
    path = Path(path)
    before, after = _enlarged(before), _enlarged(after)
    pairs = _in_a_row([before, after], _GAP)
    columns = max(1, round(math.sqrt(len(pairs) * (pairs.shape[2] + _HEADER_HEIGHT) / pairs.shape[3])))
    write_video(path, _grid(pairs, captions, columns), _FPS)

    moments = torch.linspace(0, before.shape[1] - 1, min(_SHEET_FRAMES, before.shape[1])).round().long().tolist()
    strips = [_in_a_row([videos[:, m : m + 1] for m in moments], _FRAME_GAP) for videos in (before, after)]
    sheet = _grid(_in_a_row(strips, _GAP), captions, columns=1)[0]
    sheet_path = path.with_suffix(".png")
    with replacing(sheet_path) as temporary:
        Image.fromarray(sheet.numpy()).save(temporary)
    return sheet_path


def _enlarged(videos: torch.Tensor) -> torch.Tensor:
    """Repeat the pixels of small videos [N, F, H, W, 3]: tiny frames grow without being smoothed."""
    factor = max(1, _SHOWN_SIZE // max(videos.shape[2:4]))
    return videos.cpu().repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)


def _in_a_row(videos: Sequence[torch.Tensor], gap: int) -> torch.Tensor:
    """Join [N, F, H, W, 3] stacks along the width with a gap of paper between them."""
    paper = torch.full_like(videos[0][:, :, :, :gap], _PAPER)
    return torch.cat([part for stack in videos for part in (paper, stack)][1:], dim=3)


def _grid(videos: torch.Tensor, captions: Sequence[str], columns: int) -> torch.Tensor:
    """Lay [N, F, H, W, 3] out row by row under their captions: uint8 [F, H', W', 3] with even H' and W'."""
    num_videos, num_frames, height, width = videos.shape[:4]
    cell_height, cell_width = _HEADER_HEIGHT + height + _GAP, width + _GAP
    grid_height, grid_width = math.ceil(num_videos / columns) * cell_height + _GAP, columns * cell_width + _GAP
    canvas = Image.new("RGB", (grid_width + grid_width % 2, grid_height + grid_height % 2), (_PAPER,) * 3)
    corners = [(_GAP + n // columns * cell_height, _GAP + n % columns * cell_width) for n in range(num_videos)]
    for (top, left), caption in zip(corners, captions, strict=True):
        _draw_header(canvas, caption, top, left, width)
    frames = torch.from_numpy(np.array(canvas)).repeat(num_frames, 1, 1, 1)
    for (top, left), video in zip(corners, videos, strict=True):
        top += _HEADER_HEIGHT
        frames[:, top : top + height, left : left + width] = video
    return frames


def _draw_header(canvas: Image.Image, caption: str, top: int, left: int, width: int) -> None:
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=14)
    for number, line in enumerate(_wrapped(caption, lambda text: draw.textlength(text, font) <= width)):
        draw.text((left, top + number * _LINE_HEIGHT), line, fill=_INK, font=font)
    for title, start in zip(_TITLES, (left, left + (width + _GAP) // 2), strict=True):
        draw.text((start, top + _CAPTION_LINES * _LINE_HEIGHT), title, fill=_PALE_INK, font=font)


def _wrapped(caption: str, fits: Callable[[str], bool]) -> list[str]:
    """Break a caption between words into at most _CAPTION_LINES lines, with an ellipsis where some is left over."""
    lines = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if fits(longer) or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < _CAPTION_LINES:
            lines.append(word)
        else:
            lines[-1] += " …"
            break
    return lines
