"""Self-contained HTML pages: templates filled with everything escaped, videos linked or embedded."""

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hyvideo.config.outside import read_file
from hyvideo.data.files import replacing
from hyvideo.observability.scored_videos import ScoredVideo
from hyvideo.reports.charts import in_words
from hyvideo.reports.verdict import signed

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class VideoOnPage:
    """A video as a page shows it.

    Attributes:
        url: what the page plays: relative to it, or the file itself; empty when the file is missing.
        file: the file's place in words.
        prompt: its text.
        scores: name to number; NaN marks a failed score.
        label: its name on the page.
    """

    url: str
    file: str
    prompt: str
    scores: Mapping[str, float]
    label: str = ""

    @property
    def reward(self) -> float | None:
        """The total score; NaN when it failed, None when there is none."""
        return self.scores.get("reward")


def place_video(video: ScoredVideo, page: Path, *, embed: bool, label: str = "") -> VideoOnPage:
    """Prepare a video for a page at `page`: its url is relative, or with `embed` holds the file itself."""
    relative = Path(os.path.relpath(video.path.resolve(), page.resolve().parent)).as_posix()
    url = ""
    if video.path.is_file() and video.path.stat().st_size:
        held = base64.b64encode(read_file(video.path, None)).decode() if embed else ""
        url = f"data:video/mp4;base64,{held}" if embed else quote(relative)
    return VideoOnPage(url, relative, video.prompt, video.scores, label)


def write_page(path: Path, template: str, **context: Any) -> Path:
    """Fill a template of `templates/` and write it; a reader sees the old page or the new one, never a part.

    Args:
        path: the HTML file; its folder is made.
        template: file name.
        context: what the template shows; all text is escaped.

    Raises:
        OSError: the page cannot be written.
    """
    path = Path(path)
    with replacing(path) as temporary:
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
    environment.filters |= {"number": in_words, "signed": signed}
    environment.globals["inline"] = lambda name: Markup((_TEMPLATES / name).read_text(encoding="utf-8"))
    return environment
