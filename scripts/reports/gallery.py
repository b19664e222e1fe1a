"""Videos side by side: a page where they play in sync, and a blind preference study of pairs without names."""

import json
import math
import random
import secrets
import shutil
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from hyvideo.observability.scored_videos import POSTER, ScoredVideo, last_common_step, read_scored_videos, scored_steps
from scripts.reports.page import VideoOnPage, picture_of, place_video, write_page
from scripts.reports.win_rates import CRITERIA
from scripts.reports.words import decimals_for


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
    keyed: list[dict[Hashable, ScoredVideo]] = [{} for _ in models]
    for model, videos in zip(models, keyed, strict=True):
        seen: Counter[Hashable] = Counter()
        for video in model.videos:
            asked = (video.prompt, video.seed if with_seeds else None)
            videos[asked, seen[asked]] = video
            seen[asked] += 1
    shared = [key for key in keyed[0] if all(key in videos for videos in keyed)]
    if not shared:
        examples = "; ".join(f"{m.name}: {', '.join(repr(v.prompt[:60]) for v in m.videos[:3])}" for m in models)
        raise ValueError(
            f"The folders have no prompt{' and seed' if with_seeds else ''} in common. They hold {examples}."
        )
    return [tuple(videos[key] for videos in keyed) for key in shared]


def write_gallery(path: Path, models: Sequence[Model], *, embed: bool = False) -> Path:
    """Write the gallery of two or more models, or of one, whose seeds of a prompt then stand side by side.

    With `embed` the videos are put into the file instead of being linked.
    """
    names = [model.name for model in models]
    if len(models) > 1:
        rows = [list(zip(names, row, strict=True)) for row in same_prompts(models)]
    else:
        prompts: dict[str, list[tuple[str, ScoredVideo]]] = {}
        for video in models[0].videos:
            row = prompts.setdefault(video.prompt, [])
            row.append((f"video {len(row) + 1}" if video.seed is None else f"seed {video.seed}", video))
        rows = list(prompts.values())
    placed = [[place_video(video, path, embed=embed, label=label) for label, video in row] for row in rows]
    there = [row for row in placed if any(video.url for video in row)]
    return write_page(
        path,
        "gallery.html",
        names=names,
        rows=there,
        gains=_gains(there) if len(models) > 1 else [],
        left_out=sum(len(model.videos) for model in models) - sum(len(row) for row in rows),
        not_there=len(placed) - len(there),
        decimals=decimals_for([video.reward for model in models for video in model.videos]),
    )


def _gains(rows: Sequence[Sequence[VideoOnPage]]) -> list[float]:
    """Return how much more the last model's video of each row is worth than the first one's; none if one is unknown."""
    gains = [row[-1].scores.get("reward", math.nan) - row[0].scores.get("reward", math.nan) for row in rows]
    return gains if all(map(math.isfinite, gains)) else []


def write_study(folder: Path, models: Sequence[Model], *, num_pairs: int | None = None, seed: int = 0) -> Path:
    """Write a study for raters, and beside it the key that says which video is whose, `<folder>.key.json`.

    The folder holds `index.html` and copies of the videos under random names, and can be handed out as it is. Every
    rater sees the pairs and their sides in a different order. Every two models are compared, by `num_pairs` pairs in
    all, drawn evenly over the models; None takes all. Returns the path of the key.

    Raises:
        ValueError: the folder exists, nothing is shared, a video is missing, or there are fewer pairs than asked for.
    """
    folder = Path(folder)
    key_path = folder.with_name(f"{folder.name}.key.json")
    if folder.exists() or key_path.exists():
        raise ValueError(f"'{folder}' or its key '{key_path.name}' exists already: give a new folder.")
    rows = same_prompts(models)
    random.Random(seed).shuffle(rows)
    names = [model.name for model in models]
    pairs = [pair for row in rows for pair in combinations(zip(names, row, strict=True), 2)]
    if num_pairs is not None and not 1 <= num_pairs <= len(pairs):
        raise ValueError(f"num_pairs must lie in 1..{len(pairs)}, all pairs there are; received {num_pairs}.")
    pairs = pairs[:num_pairs]  # prompt by prompt, so every two models have as many
    paths = {video.path for pair in pairs for _, video in pair}
    if missing := sorted(str(path) for path in paths if not (path.is_file() and path.stat().st_size)):
        raise ValueError(f"{len(missing)} of the videos are missing or empty, such as '{missing[0]}': make them again.")
    (folder / "videos").mkdir(parents=True)
    key: dict = {"study": secrets.token_hex(6), "models": {}, "pairs": {}, "prompts": {}}
    sizes: dict[str, tuple[int, int]] = {}
    for pair in pairs:
        videos = [secrets.token_hex(6) for _ in pair]
        for name, (model, video) in zip(videos, pair, strict=True):
            key["models"][name] = model
            shutil.copyfile(video.path, folder / "videos" / f"{name}.mp4")
            if found := picture_of(video.path):
                picture, sizes[name] = found
                (folder / "videos" / f"{name}{POSTER}").write_bytes(picture)
        number = secrets.token_hex(6)
        key["pairs"][number], key["prompts"][number] = videos, pair[0][1].prompt
    write_page(
        folder / "index.html",
        "preference.html",
        study=key["study"],
        pairs=[  # sorted, so that the order says nothing
            {"pair": number, "prompt": key["prompts"][number], "videos": sorted(videos)}
            for number, videos in key["pairs"].items()
        ],
        sizes=dict(sorted(sizes.items())),
        criteria=CRITERIA,
    )
    key_path.write_text(json.dumps(key, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return key_path
