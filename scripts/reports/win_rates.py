"""Win rates of a blind preference study, with their uncertainty."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from hyvideo.config.outside import read_file
from hyvideo.evaluation.intervals import wilson_interval

CRITERIA = {
    "visual_quality": ("Visual quality", "Which looks better: sharp, clean, pleasing?"),
    "motion_quality": ("Motion quality", "Which moves better: smooth, natural, plausible?"),
    "semantic_alignment": ("Semantic alignment", "Which shows what the text says?"),
}
"""What raters judge, as in the paper's user study: name -> title and question."""
TIE = "tie"


@dataclass(frozen=True)
class Vote:
    """One judgement.

    Attributes:
        criterion: a key of `CRITERIA`.
        choice: the preferred video, or `tie`.
        count: number of the judgement among those of its rater; of two on one question the one of the higher number
            counts, and of equal ones that of the later file.
    """

    study: str
    rater: str
    pair: str
    criterion: str
    choice: str
    count: int


@dataclass(frozen=True)
class WinRate:
    """How often one model was preferred to another.

    Attributes:
        first, second: the model whose rate it is, and the one it was compared with.
        wins, ties, losses: votes for the first, for neither, for the second.
        num_pairs: pairs of videos judged.
        num_raters: people who judged them.
        rate: share of raters who preferred the first, a tie counted half: mean over prompts of the mean over their
            pairs.
        low, high: ends of its 95 % interval.
    """

    first: str
    second: str
    criterion: str
    wins: int
    ties: int
    losses: int
    num_pairs: int
    num_raters: int
    rate: float
    low: float
    high: float


class _Votes(BaseModel):
    model_config = ConfigDict(strict=True)
    votes: list[Vote]


class _Key(BaseModel):
    """A study's key: the model of every video, and the two videos and the prompt of every pair."""

    model_config = ConfigDict(strict=True)
    study: str
    models: dict[str, str]
    pairs: dict[str, tuple[str, str]]
    prompts: dict[str, str] = {}  # a pair without one counts as a prompt of its own


_File = TypeVar("_File", _Votes, _Key)


def read_votes(paths: Sequence[Path]) -> list[Vote]:
    """Read and merge vote files, merged ones too; a rater's later judgement replaces the earlier one.

    Raises:
        ValueError: a file is not one of votes, or the files belong to different studies.
    """
    found = [vote for path in paths for vote in _read(_Votes, path, "a JSON object with votes").votes]
    latest = {(vote.rater, vote.pair, vote.criterion): vote for vote in sorted(found, key=attrgetter("count"))}
    studies = sorted({vote.study for vote in latest.values()})
    if len(studies) > 1:
        raise ValueError(f"The vote files belong to {len(studies)} studies ({', '.join(studies)}): give those of one.")
    return list(latest.values())


def write_votes(path: Path, votes: Sequence[Vote]) -> None:
    """Write merged votes, in the form that `read_votes` reads."""
    content = {"votes": [asdict(vote) for vote in votes]}
    Path(path).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def win_rates(key_path: Path, votes: Sequence[Vote]) -> list[WinRate]:
    """Count the votes of every two models by criterion.

    Neither raters who judge the same pair nor seeds of the same prompt count as more: each prompt contributes the mean
    of its pairs, each of these that of its raters, and the interval is Wilson's for that many prompts. It is over
    prompts for these raters: how far others would judge otherwise is not in it.

    Raises:
        ValueError: the key cannot be read, or a vote does not belong to it.
    """
    key = _read(_Key, key_path, "the key of a study")
    chosen: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    raters: dict[tuple[str, str, str], set[str]] = {}
    for vote in votes:
        place = (*_models_of(vote, key, key_path), vote.criterion)
        won = 0.5 if vote.choice == TIE else float(key.models[vote.choice] == place[0])
        chosen.setdefault(place, {}).setdefault(vote.pair, []).append(won)
        raters.setdefault(place, set()).add(vote.rater)
    rates = []
    for place in sorted(chosen, key=lambda place: (*place[:2], list(CRITERIA).index(place[2]))):
        by_prompt: dict[str, list[float]] = {}
        for pair, of_pair in chosen[place].items():
            by_prompt.setdefault(key.prompts.get(pair, pair), []).append(mean(of_pair))
        rate = mean(mean(of_prompt) for of_prompt in by_prompt.values())
        counted = [won for of_pair in chosen[place].values() for won in of_pair]
        counts = (*(counted.count(won) for won in (1.0, 0.5, 0.0)), len(chosen[place]), len(raters[place]))
        rates.append(WinRate(*place, *counts, rate, *wilson_interval(rate, len(by_prompt))))
    return rates


def _models_of(vote: Vote, key: _Key, key_path: Path) -> tuple[str, str]:
    """Look up whose videos a vote compares, in a fixed order."""
    videos = key.pairs.get(vote.pair)
    if vote.study != key.study or videos is None:
        raise ValueError(
            f"{key_path} is the key of study {key.study}; received a vote of study {vote.study} on {vote.pair}."
        )
    if vote.choice not in (TIE, *videos):
        raise ValueError(
            f"{key_path}: {vote.rater!r} chose {vote.choice!r} of pair {vote.pair!r}; expected {TIE} or one of its "
            f"videos, {' or '.join(videos)}. The file of votes was changed: ask for it again."
        )
    if vote.criterion not in CRITERIA:
        raise ValueError(f"A vote judges '{vote.criterion}'; expected one of {', '.join(CRITERIA)}.")
    if nameless := [video for video in videos if video not in key.models]:
        raise ValueError(f"{key_path} does not say which model {', '.join(nameless)} is from.")
    return key.models[videos[0]], key.models[videos[1]]


def _read(kind: type[_File], path: Path, what: str) -> _File:
    try:
        return kind.model_validate_json(read_file(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected {what}, as the study's page or program writes it: {error}") from error
