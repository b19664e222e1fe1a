"""Scores of video files, each computed once: what a score depends on is kept beside it."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, FiniteFloat

from hyvideo.config.outside import as_value_error
from hyvideo.data.videos import read_video
from hyvideo.models.reward_models.registry import RewardModel, Videos, checked_answer

SCORES = "evaluation_scores.jsonl"
"""File of the scores, in the folder of the videos."""


@dataclass(frozen=True)
class NamedReward:
    """A registered reward and its source (options, weights, use), which decides whether an old score still counts."""

    name: str
    source: Mapping[str, Any]
    model: RewardModel


class _Row(BaseModel, strict=True):
    key: str
    scores: dict[str, FiniteFloat | None]


class ScoreFile:
    """A JSON Lines file with one row per video and reward, created with the first score.

    A row counts for a file of the same content, the same prompt, and the same reward from the same source. Rows are
    written block by block, so a stopped run continues where it was.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scores = {row.key: row.scores for row in _rows(path)}

    def score(self, reward: NamedReward, videos: Sequence[Path], prompts: Sequence[str]) -> dict[str, list[float]]:
        """Score N mp4 files for their N prompts: each metric `[N]`, NaN where it failed."""
        keys = []
        for video, prompt in zip(videos, prompts, strict=True):
            content = hashlib.sha256(video.read_bytes()).hexdigest()
            decides = json.dumps([reward.name, dict(reward.source), prompt, content], sort_keys=True)
            keys.append(hashlib.sha256(decides.encode()).hexdigest()[:24])
        missing = [number for number, key in enumerate(keys) if key not in self._scores]
        size = reward.model.context.batch_size
        for start in range(0, len(missing), size):
            block = missing[start : start + size]
            found = _score_block(reward, [videos[n] for n in block], [prompts[n] for n in block])
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                for n, scores in zip(block, found, strict=True):
                    valid = {name: None if math.isnan(value) else value for name, value in scores.items()}
                    row = {"video": videos[n].name, "key": keys[n], "scores": valid}
                    file.write(json.dumps(row, allow_nan=False) + "\n")
                    self._scores[keys[n]] = valid
        columns = {name: [self._scores[key][name] for key in keys] for name in reward.model.metrics}
        return {name: [math.nan if value is None else value for value in column] for name, column in columns.items()}


def _rows(path: Path) -> list[_Row]:
    """Read the rows; a torn last line, which a killed process leaves, is cut off."""
    if not path.is_file():
        return []
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    rows = []
    for number, line in enumerate(lines, 1):
        what = f"{path}, line {number}: not a row of scores; delete it and they are made again"
        with as_value_error(what, ValueError):
            rows.append(_Row.model_validate_json(line))
    return rows


def _score_block(reward: NamedReward, videos: Sequence[Path], prompts: Sequence[str]) -> list[dict[str, float]]:
    """Score files as the reward reads them: as paths, or as frames, those of one shape together."""
    if reward.model.reads == "file":
        return _by_video(reward, videos, prompts)
    frames = [read_video(path) for path in videos]
    rows = []
    for _, numbers in groupby(range(len(videos)), key=lambda number: frames[number].shape):
        alike = list(numbers)
        rows += _by_video(reward, torch.stack([frames[n] for n in alike]), [prompts[n] for n in alike])
    return rows


def _by_video(reward: NamedReward, videos: Videos, prompts: Sequence[str]) -> list[dict[str, float]]:
    scores = checked_answer(reward.name, reward.model, videos, prompts)
    columns = {name: values.tolist() for name, values in scores.items()}
    return [{name: column[row] for name, column in columns.items()} for row in range(len(prompts))]
