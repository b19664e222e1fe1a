"""Yes/no questions about the videos of a prompt, from the column `checks` of a prompt CSV."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, ValidationError, field_validator

from hyvideo.config.outside import as_value_error
from hyvideo.data.prompts import prompt_rows

COLUMN = "checks"
"""The column: JSON such as `[{"question": "Is there a red circle?", "answer": "yes"}]`, or empty."""


class Check(BaseModel, frozen=True, extra="forbid"):
    """A question about a video, and its right answer."""

    question: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    answer: Literal["yes", "no"]

    @field_validator("question")
    @classmethod
    def _has_no_special_token(cls, question: str) -> str:
        if "<|" in question:
            raise ValueError("a question must not hold '<|', which begins a model's special tokens")
        return question


CHECKS = TypeAdapter(Annotated[tuple[Check, ...], Field(min_length=1)])
"""Reads and writes the JSON of a cell."""


def parse_checks(cell: str) -> tuple[Check, ...]:
    """Read the checks of one cell, none from an empty one; a ValueError if it is not as `COLUMN` says."""
    what = f'expected [{{"question": "...", "answer": "yes" or "no"}}, ...]; received {cell!r:.120}'
    with as_value_error(what, ValidationError):
        return CHECKS.validate_json(cell) if cell else ()


def read_checks(paths: Sequence[str | Path]) -> dict[str, tuple[Check, ...]]:
    """Return the checks of every prompt that has some, by its text.

    A ValueError names file and line: a file cannot be read or has no such column, cells are malformed, one prompt has
    two different sets of checks, or no prompt has any.
    """
    found: dict[str, tuple[Check, ...]] = {}
    problems = []
    for path in map(Path, paths):
        named = False
        for where, row in prompt_rows(path):
            named = named or COLUMN in row
            try:
                checks = parse_checks(row.get(COLUMN, ""))
            except ValueError as error:
                problems.append(f"{where}: {COLUMN}: {error}")
                continue
            text = row.get("prompt", "")
            if checks and found.setdefault(text, checks) != checks:
                problems.append(f"{where}: {COLUMN}: the same prompt has other checks in an earlier line")
        if not named:
            problems.append(f"{path}: there is no column `{COLUMN}`")
    if not problems and not found:
        problems.append(f"{', '.join(map(str, paths))}: no prompt has any {COLUMN}")
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems[:20])
        raise ValueError(f"{len(problems)} problems of checks (python -m scripts.make_checks writes them):\n{listed}")
    return found
