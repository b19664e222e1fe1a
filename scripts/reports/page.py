"""Self-contained HTML pages: templates filled with everything escaped, videos linked or embedded."""

import base64
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from hyvideo.config.outside import read_file
from hyvideo.data.files import replacing
from hyvideo.data.videos import poster_of, read_video
from hyvideo.observability.scored_videos import POSTER, ScoredVideo
from scripts.reports.words import fixed, in_words, signed

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class VideoOnPage:
    """A video as a page shows it.

    Attributes:
        url: what the page plays: relative to it, or the file itself; empty when the file is missing.
        file: the file's place in words.
        poster: url of its first frame, as `url`; empty when there is none.
        size: width and height of that picture, which has the video's ratio.
    """

    url: str
    file: str
    prompt: str
    scores: Mapping[str, float]
    label: str = ""
    poster: str = ""
    size: tuple[int, int] = (16, 9)

    @property
    def reward(self) -> float | None:
        """The total score; NaN when it failed, None when there is none."""
        return self.scores.get("reward")


def place_video(video: ScoredVideo, page: Path, *, embed: bool, label: str = "") -> VideoOnPage:
    """Prepare a video for a page at `page`: its url is relative, or with `embed` holds the file itself."""
    file = unquote(relative_url(video.path, page))
    if not (video.path.is_file() and video.path.stat().st_size):
        return VideoOnPage("", file, video.prompt, video.scores, label)
    url = data_url("video/mp4", read_file(video.path, None)) if embed else relative_url(video.path, page)
    placed = VideoOnPage(url, file, video.prompt, video.scores, label)
    found, beside = picture_of(video.path), video.path.with_suffix(POSTER)
    if not found:
        return placed
    picture, size = found
    linked = _is_own(beside) and not embed
    return replace(placed, poster=relative_url(beside, page) if linked else data_url("image/jpeg", picture), size=size)


def picture_of(video: Path) -> tuple[bytes, tuple[int, int]] | None:
    """Return a JPEG of a video's first frame, and its width and height: the picture beside the video, or a new one.

    Without a picture it returns None instead of raising, because the page itself says which videos cannot be played.
    """
    beside = video.with_suffix(POSTER)
    try:
        picture = read_file(beside, None) if _is_own(beside) else poster_of(read_video(video, [0])[0])
        with Image.open(io.BytesIO(picture), formats=["JPEG"]) as image:
            return picture, image.size
    except (ValueError, OSError, Image.DecompressionBombError):
        return None


def _is_own(file: Path) -> bool:
    """Whether a file is there, and no link to another one."""
    return file.is_file() and not file.is_symlink()


def relative_url(path: Path, page: Path) -> str:
    """Return the link from a page to a file."""
    return quote(Path(os.path.relpath(path.resolve(), page.resolve().parent)).as_posix())


def data_url(kind: str, content: bytes) -> str:
    """Return a link that holds the content itself."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def write_page(path: Path, template: str, **context: Any) -> Path:
    """Fill a template of `templates/`, everything escaped; a reader sees the old page or the new one, never a part.

    Raises:
        ValueError: the path does not end in `.html`: it may be a file of the run.
    """
    path = Path(path)
    with replacing(path) as temporary:
        if path.suffix != ".html":
            raise ValueError(f"'{path}': a page is written to a file ending in .html, and to no other.")
        # A lone surrogate, which JSON can hold and UTF-8 cannot, becomes a question mark.
        temporary.write_bytes(_environment().get_template(template).render(context).encode("utf-8", errors="replace"))
    return path


@cache
def _environment() -> Environment:
    """The templates, with escaping on for every file."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": in_words, "signed": signed, "fixed": fixed}
    environment.globals["inline"] = lambda name: Markup((_TEMPLATES / name).read_text(encoding="utf-8"))
    return environment
