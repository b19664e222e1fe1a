"""A blind preference study: pairs of videos without names, for raters to vote on in any browser."""

import json
import random
import secrets
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from hyvideo.data.files import nearest_existing
from hyvideo.observability.scored_videos import POSTER, ScoredVideo
from scripts.reports.gallery import Model, same_prompts
from scripts.reports.page import picture_of, write_page
from scripts.reports.win_rates import CRITERIA

Pair = tuple[tuple[str, ScoredVideo], ...]
"""The (model, video) of both sides."""


def write_study(folder: Path, models: Sequence[Model], *, num_pairs: int | None = None, seed: int = 0) -> Path:
    """Write a study for raters, and beside it the key that says which video is whose.

    The folder holds `index.html` and copies of the videos under random names, and can be handed out as it is. Every
    rater sees the pairs and their sides in a different order. Every two models are compared, by `num_pairs` pairs in
    all, drawn evenly over the models; None takes all.

    Returns:
        The path of the key, `<folder>.key.json`.

    Raises:
        ValueError: the folder exists, nothing is shared, a video is missing, there are fewer pairs than asked for, or
            no room for the copies.
    """
    folder = Path(folder)
    key_path = folder.with_name(f"{folder.name}.key.json")
    if folder.exists() or key_path.exists():
        raise ValueError(f"'{folder}' or its key '{key_path.name}' exists already: give a new folder.")
    pairs = _draw_pairs(models, num_pairs, seed)
    paths = {video.path for pair in pairs for _, video in pair}
    if missing := sorted(str(path) for path in paths if not (path.is_file() and path.stat().st_size)):
        raise ValueError(f"{len(missing)} of the videos are missing or empty, such as '{missing[0]}': make them again.")
    _check_space(folder, pairs)
    (folder / "videos").mkdir(parents=True)
    models_of: dict[str, str] = {}
    videos_of: dict[str, list[str]] = {}
    prompts_of: dict[str, str] = {}
    sizes: dict[str, tuple[int, int]] = {}
    shown = []
    for pair in pairs:
        names = [secrets.token_hex(6) for _ in pair]
        for name, (model, video) in zip(names, pair, strict=True):
            models_of[name] = model
            shutil.copyfile(video.path, folder / "videos" / f"{name}.mp4")
            if found := picture_of(video.path):
                picture, sizes[name] = found
                (folder / "videos" / f"{name}{POSTER}").write_bytes(picture)
        pair_name = secrets.token_hex(6)
        videos_of[pair_name], prompts_of[pair_name] = names, pair[0][1].prompt
        shown.append({"pair": pair_name, "prompt": pair[0][1].prompt, "videos": sorted(names)})  # no order to read
    study = secrets.token_hex(6)
    page = {"study": study, "pairs": shown, "sizes": dict(sorted(sizes.items())), "criteria": CRITERIA}
    write_page(folder / "index.html", "preference.html", **page)
    key = {"study": study, "models": models_of, "pairs": videos_of, "prompts": prompts_of}
    key_path.write_text(json.dumps(key, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return key_path


def _draw_pairs(models: Sequence[Model], num_pairs: int | None, seed: int) -> list[Pair]:
    """Choose ((model, video), (model, video)) pairs of one prompt, as many of every two models."""
    rows = same_prompts(models)
    random.Random(seed).shuffle(rows)
    names = [model.name for model in models]
    whole = [two for row in rows for two in combinations(zip(names, row, strict=True), 2)]
    if num_pairs is not None and not 1 <= num_pairs <= len(whole):
        raise ValueError(f"num_pairs must lie in 1..{len(whole)}, all pairs there are; received {num_pairs}.")
    return whole[:num_pairs]  # prompt by prompt, so every two models have as many


def _check_space(folder: Path, pairs: Sequence[Pair]) -> None:
    """Refuse a study whose copies do not fit."""
    needed = sum(video.path.stat().st_size for pair in pairs for _, video in pair)
    free = shutil.disk_usage(nearest_existing(folder)).free
    if needed > free:
        raise ValueError(
            f"'{folder}': the videos of {len(pairs)} pairs need {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are "
            "free. Take fewer pairs (--num_pairs), free space, or give a folder elsewhere."
        )
