"""A page that shows several models' videos of the same prompts and seeds side by side, playing in sync."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyvideo.observability.scored_videos import ScoredVideo, read_scored_videos, scored_steps
from hyvideo.reports.page import place_video, write_page

_MAX_LISTED = 3


@dataclass(frozen=True)
class Model:
    """A model as its videos show it.

    Attributes:
        name: what it is called.
        videos: its videos in file order.
    """

    name: str
    videos: tuple[ScoredVideo, ...]


def read_model(folder: Path, name: str | None = None) -> Model:
    """Read the videos of one model.

    Args:
        folder: videos as `generate.py --prompts_csv` or validation write them, or a run folder, of which the last
            validation is taken.
        name: by default the folder's name.

    Raises:
        ValueError: there are no videos.
    """
    folder = Path(folder)
    validations = [*scored_steps(folder / "samples").values()]
    return Model(name or folder.resolve().name, read_scored_videos(validations[-1] if validations else folder))


def same_prompts(models: Sequence[Model]) -> list[tuple[ScoredVideo, ...]]:
    """Put the models' videos of one prompt and seed together, in the order of the first model: one video per model.

    Where a folder does not say its seeds (validation's are fixed by the settings), videos of a prompt are matched in
    their order.

    Raises:
        ValueError: fewer than two models, two of one name, or nothing in common.
    """
    names = [model.name for model in models]
    if len(models) < 2 or len(set(names)) < len(names):
        raise ValueError(
            f"Expected two or more folders with names of their own; received {', '.join(names) or 'none'}. "
            "Name them, as in `base=outputs/a trained=outputs/b`."
        )
    with_seeds = all(video.seed is not None for model in models for video in model.videos)
    keyed = [_keyed(model, with_seeds) for model in models]
    shared = [key for key in keyed[0] if all(key in videos for videos in keyed)]
    if not shared:
        examples = "; ".join(
            f"{model.name}: {', '.join(repr(video.prompt[:60]) for video in model.videos[:_MAX_LISTED])}"
            for model in models
        )
        raise ValueError(
            f"The folders have no prompt{' and seed' if with_seeds else ''} in common. They hold {examples}."
        )
    return [tuple(videos[key] for videos in keyed) for key in shared]


def write_gallery(path: Path, models: Sequence[Model], *, embed: bool = False) -> Path:
    """Write the gallery of two or more models.

    Args:
        path: the HTML file.
        models: what to compare.
        embed: put the videos into the file instead of linking them.

    Raises:
        ValueError: see `same_prompts`.
        OSError: the page cannot be written.
    """
    rows = same_prompts(models)
    placed = [
        [place_video(video, path, embed=embed, label=model.name) for model, video in zip(models, row, strict=True)]
        for row in rows
    ]
    left_out = sum(len(model.videos) - len(rows) for model in models)
    return write_page(path, "gallery.html", names=[model.name for model in models], rows=placed, left_out=left_out)


def _keyed(model: Model, with_seeds: bool) -> dict[Hashable, ScoredVideo]:
    """Name each video by its prompt, seed if it counts, and its number among equal ones."""
    seen: Counter[Hashable] = Counter()
    keyed = {}
    for video in model.videos:
        asked = (video.prompt, video.seed if with_seeds else None)
        keyed[asked, seen[asked]] = video
        seen[asked] += 1
    return keyed
