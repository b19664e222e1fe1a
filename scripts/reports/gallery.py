"""A page of videos side by side, playing in sync: several models' of one prompt and seed, or one model's seeds."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyvideo.observability.scored_videos import ScoredVideo, last_common_step, read_scored_videos, scored_steps
from scripts.reports.charts import decimals_for
from scripts.reports.page import place_video, write_page

_MAX_LISTED = 3


@dataclass(frozen=True)
class Model:
    """A model as its videos show it, which are in file order."""

    name: str
    videos: tuple[ScoredVideo, ...]


def read_models(named: Sequence[tuple[str | None, Path]]) -> list[Model]:
    """Read several models, called by a name or as their folders.

    A folder holds videos as `generate.py --prompts_csv` or validation write them, or is a run folder, of which the last
    validation is taken that all run folders have in common.

    Raises:
        ValueError: there are no videos, or run folders have no validation after the same update.
    """
    steps = {folder: scored_steps(folder / "samples") for _, folder in named}
    common = last_common_step(steps.values())
    if common is None and any(steps.values()):
        found = "; ".join(f"{folder} has {[*made]}" for folder, made in steps.items() if made)
        raise ValueError(f"No update after which all runs validated: {found}. Name folders below samples/ instead.")
    videos = {folder: read_scored_videos(steps[folder].get(common, folder)) for _, folder in named}
    return [Model(name or folder.resolve().name, videos[folder]) for name, folder in named]


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
    """Write the gallery of two or more models, or of one, whose seeds of a prompt then stand side by side.

    With `embed` the videos are put into the file instead of being linked.

    Raises:
        ValueError: see `same_prompts`.
        OSError: the page cannot be written.
    """
    if len(models) > 1:
        rows = same_prompts(models)
    else:
        prompts: dict[str, list[ScoredVideo]] = {}
        for video in models[0].videos:
            prompts.setdefault(video.prompt, []).append(video)
        rows = list(prompts.values())
    names = [model.name for model in models]
    placed = []
    for row in rows:
        labelled = zip(names if len(models) > 1 else _seed_labels(row), row, strict=True)
        placed.append([place_video(video, path, embed=embed, label=label) for label, video in labelled])
    there = [row for row in placed if any(video.url for video in row)]
    left_out = sum(len(model.videos) for model in models) - sum(len(row) for row in rows)
    decimals = decimals_for([video.reward for model in models for video in model.videos])
    shown = {"rows": there, "left_out": left_out, "not_there": len(placed) - len(there)}
    return write_page(path, "gallery.html", names=names, decimals=decimals, **shown)


def _seed_labels(row: Sequence[ScoredVideo]) -> list[str]:
    """Name a prompt's videos by their seeds, or by their places where the folder does not say them."""
    return [f"video {place}" if video.seed is None else f"seed {video.seed}" for place, video in enumerate(row, 1)]


def _keyed(model: Model, with_seeds: bool) -> dict[Hashable, ScoredVideo]:
    """Name each video by its prompt, seed if it counts, and its number among equal ones."""
    seen: Counter[Hashable] = Counter()
    keyed = {}
    for video in model.videos:
        asked = (video.prompt, video.seed if with_seeds else None)
        keyed[asked, seen[asked]] = video
        seen[asked] += 1
    return keyed
