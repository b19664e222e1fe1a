"""Yes/no questions about the videos of a prompt, from the column `checks` of a prompt CSV."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json

from hyvideo.data.prompts import rows_of_csv

COLUMN = "checks"
"""The column: JSON such as `[{"question": "Is there a red circle?", "answer": "yes"}]`, or empty."""


@dataclass(frozen=True)
class Check:
    """A question about a video, and whether the right answer is yes."""

    question: str
    expected: bool


def parse_checks(cell: str) -> tuple[Check, ...]:
    """Read the checks of one cell, none from an empty one; a ValueError if it is not as `COLUMN` says."""
    if not cell:
        return ()
    shape = 'expected [{"question": "...", "answer": "yes" or "no"}, ...]'
    try:
        entries = from_json(cell)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); {shape}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{shape}; received {cell!r:.120}")
    checks = []
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) != {"question", "answer"}:
            raise ValueError(f"{shape}; received the entry {entry!r:.120}")
        question, answer = entry["question"], entry["answer"]
        if not isinstance(question, str) or not question.strip() or "<|" in question:
            raise ValueError(
                f"a question must be text without '<|', which begins a model's special tokens: {entry!r:.120}"
            )
        if answer not in ("yes", "no"):
            raise ValueError(f"an answer must be yes or no; received the entry {entry!r:.120}")
        checks.append(Check(question.strip(), answer == "yes"))
    return tuple(checks)


def checks_as_text(checks: Sequence[Check]) -> str:
    """Write checks as a cell holds them."""
    return json.dumps(
        [{"question": check.question, "answer": "yes" if check.expected else "no"} for check in checks],
        ensure_ascii=False,
    )


def read_checks(paths: Sequence[str | Path]) -> dict[str, tuple[Check, ...]]:
    """Return the checks of every prompt that has some, by its text.

    A ValueError names file and line: a file cannot be read or has no such column, cells are malformed, one prompt has
    two different sets of checks, or no prompt has any.
    """
    found: dict[str, tuple[Check, ...]] = {}
    problems = []
    for path in map(Path, paths):
        named = False
        for where, row in rows_of_csv(path):
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
        more = f"\n  - and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(f"checks of prompts (python -m scripts.make_checks writes them):\n{listed}{more}")
    return found
