"""Videos on disk with what is known of them: prompt, seed and scores."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic_core import from_json

SCORES = "scores.jsonl"
"""Written after a folder's videos."""
POSTER = ".jpg"
"""Ending of the picture beside a video that training wrote: its first frame."""
TOO_LARGE = 1e100
"""Numbers from here on are read as missing: no float holds their squares and sums, which pages compute."""


@dataclass(frozen=True)
class ScoredVideo:
    """One video file."""

    path: Path  # the mp4; it may be missing
    prompt: str  # its text, or the file's name when none is known
    seed: int | None = None  # of its noise, where it is known
    how: str = ""  # it was sampled and scored, in words; videos are paired where it is equal
    scores: Mapping[str, float] = field(default_factory=dict)  # `reward` first where there is one; NaN: it failed
    looks: Mapping[str, float] = field(default_factory=dict)  # what drift is measured by, where it was
    advantage: float = math.nan  # in its round, where it was trained on

    @property
    def reward(self) -> float:
        """The total score; NaN when it failed or there is none."""
        return self.scores.get("reward", math.nan)


def scored_steps(folder: Path) -> dict[int, Path]:
    """Return the `step_N` folders below `folder` by N, in order, without one whose videos are still being made."""
    numbers = {path: re.fullmatch(r"step_(\d+)", path.name) for path in folder.glob("step_*")}
    steps = {int(number[1]): path for path, number in numbers.items() if number and (path / SCORES).is_file()}
    return dict(sorted(steps.items()))


def last_common_step(validations: Iterable[Collection[int]]) -> int | None:
    """Return the last update after which all runs validated that validated at all; None if there is none."""
    steps = [set(found) for found in validations if found]
    return max(set.intersection(*steps), default=None) if steps else None


def read_scored_videos(folder: Path) -> tuple[ScoredVideo, ...]:
    """Read a folder of videos in file order; a ValueError if it holds none, or a note cannot be read.

    The folder may hold a `scores.jsonl` (written by training), a JSON note of each mp4 (written by `generate.py`), or
    bare mp4 files, whose names then stand for their prompts.
    """
    folder = Path(folder)
    found: list[ScoredVideo] = []
    if (folder / SCORES).is_file():
        lines = (folder / SCORES).read_bytes().split(b"\n")  # a prompt may hold other line ends
        rows = [read_note(line, f"{folder / SCORES}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
        found = [_of_row(folder, row, f"{folder / SCORES}") for row in rows]
    else:
        for path in sorted(folder.glob("*.mp4")):
            places = [place for apart in (False, True) if (place := note_path(path, apart=apart)).is_file()]
            note = read_note(places[0].read_bytes(), str(places[0])) if places else {}
            prompt = note.get("prompt")
            found.append(ScoredVideo(path, prompt if isinstance(prompt, str) else path.stem, _seed_of(note)))
    if not found:
        raise ValueError(
            f"'{folder}' holds no videos: expected *.mp4 files, a {SCORES} or a run's validation videos "
            "(every validation_interval updates)."
        )
    return tuple(found)


def _of_row(folder: Path, row: Mapping[str, object], where: str) -> ScoredVideo:
    video, prompt = row.get("video"), row.get("prompt")
    if not (isinstance(video, str) and isinstance(prompt, str)):
        raise ValueError(f"{where}: expected rows with the texts 'video' and 'prompt'; received keys {sorted(row)}.")
    if Path(video).name != video or video in ("", "..") or len(video) > 255 or (folder / video).is_symlink():
        raise ValueError(f"{where}: video {video!r} lies elsewhere; expected the name of a file beside {SCORES}.")
    how, looks = row.get("how", ""), row.get("looks")
    scores = _numbers({name: value for name, value in row.items() if name not in ("video", "prompt", "seed")})
    looks, advantage = _numbers(looks) if isinstance(looks, dict) else {}, scores.pop("advantage", math.nan)
    how = how if isinstance(how, str) else ""
    return ScoredVideo(folder / video, prompt, _seed_of(row), how, scores, looks, advantage)


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are numbers; NaN for null and for what is TOO_LARGE."""
    numbers = {}
    for name, value in values.items():
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            numbers[name] = math.nan if value is None or not abs(value) < TOO_LARGE else float(value)
    return numbers


def notes_folder(videos: Path, *, apart: bool) -> Path:
    """Return where notes on the videos of a folder lie: in it, or apart in `<folder>_notes`."""
    return Path(f"{videos.absolute()}_notes") if apart else videos


def note_path(video: Path, *, apart: bool) -> Path:
    """Return the file that says how a video was made."""
    return notes_folder(video.parent, apart=apart) / f"{video.stem}.json"


def read_note(text: bytes, where: str) -> Mapping[str, object]:
    """Parse one JSON object; a ValueError, in which `where` names it, if the text is something else."""
    try:
        note = from_json(text)
    except ValueError:
        note = None
    if not isinstance(note, dict):
        raise ValueError(f"{where}: expected a JSON object; received {text[:80].decode(errors='replace')!r}.")
    return note


def _seed_of(note: Mapping[str, object]) -> int | None:
    """Return the seed a note gives, if it is one."""
    seed = note.get("seed")
    return seed if isinstance(seed, int) else None
