"""Prompts from CSV, text and JSON lines: strict, because one misread row would train on the wrong text for days."""

import csv
import hashlib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic_core import from_json, to_json

from hyvideo.config.outside import as_value_error, read_file, with_home

_LOG = logging.getLogger(__name__)

COLUMNS = ("prompt", "index", "seed", "ref_image_path")
"""The columns that are read; only `prompt` is needed, and others are left alone."""


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file."""

    text: str  # without surrounding blanks
    index: int  # unique over all files read together; without an `index` value its position in them, from 0
    seed: int | None  # of its noise in validation and generation, where the row gives one
    ref_image_path: str | None  # image to start from (image-to-video)

    @property
    def noise_index(self) -> int:
        """What decides a sampled video's noise besides the seed: `index`, or 0 where the row has a seed of its own."""
        return self.index if self.seed is None else 0


def repeated(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` of the prompts, from the first on again where there are fewer, each with another noise."""
    unused = 1 + max(prompt.index for prompt in prompts) - len(prompts)
    again = (replace(prompts[i % len(prompts)], index=unused + i, seed=None) for i in range(len(prompts), count))
    return [*prompts[:count], *again]


def read_prompts(paths: Sequence[str | Path], image_root: str | Path | None = None) -> list[Prompt]:
    """Read prompt files (`prompt_rows`), in order, as one list.

    Columns: `prompt`, and optionally `index` (a whole number from 0, or a name), `seed` (a whole number from 0) and
    `ref_image_path` (relative to the folder of its file, or else to the working directory).

    All images must lie in `image_root`, links followed, if it is given. A ValueError names file and line of whatever
    is missing, malformed or there twice.
    """
    prompts: list[Prompt] = []
    first_use: dict[int, str] = {}
    for path in map(Path, paths):
        count = len(prompts)
        for where, row in prompt_rows(path):
            prompt = _prompt(row, len(prompts), path, where, image_root)
            if prompt.index in first_use:
                raise ValueError(
                    f"{where}: index {prompt.index} is already that of {first_use[prompt.index]}; an index must be "
                    "unique over all files (a row without one takes its position)"
                )
            first_use[prompt.index] = where
            prompts.append(prompt)
        if len(prompts) == count:
            raise ValueError(f"{path}: no prompts; expected a line for each, in a CSV below a header with `prompt`")
    return prompts


def prompt_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (file and line, column -> value without surrounding blanks) of every prompt in a file.

    It is `.txt` with a prompt in each line, `.jsonl` with an object in each, or else CSV with a header; UTF-8, with or
    without a byte order mark. Values that are not given are empty, and empty lines are skipped.
    """
    with as_value_error(f"prompt file {str(path)!r} cannot be read", OSError, ValueError):
        content = read_file(path, None)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: byte {content[error.start]:#04x} is not UTF-8") from error
    if (kind := path.suffix.lower()) not in (".txt", ".jsonl"):
        yield from _csv_rows(text, path)
        return
    for number, line in enumerate(text.split("\n"), 1):
        where, line = f"{path}, line {number}", line.strip()
        if line:
            yield where, {"prompt": line} if kind == ".txt" else _json_row(line, where)


def _json_row(line: str, where: str) -> dict[str, str]:
    """Read one object; values that are no text are as in a CSV: none is empty, a list is its JSON."""
    with as_value_error(f'{where}: expected a JSON object such as {{"prompt": "a cat", "seed": 1}}', ValueError):
        row = from_json(line)
        if not isinstance(row, dict) or "prompt" not in row:
            raise ValueError(f"received {line!r:.80}")
    texts = {name: value if isinstance(value, str) else to_json(value).decode() for name, value in row.items()}
    return {name: "" if row[name] is None else text.strip() for name, text in texts.items()}


def _csv_rows(text: str, path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a CSV."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    while True:
        where = f"{path}, line {reader.line_num + 1}"
        with as_value_error(f"{where}: not proper CSV", csv.Error):
            cells = next(reader, None)
        if cells is None:
            return
        cells = [cell.strip() for cell in cells]
        if not cells:
            continue
        if header is None:
            header = cells
            if any(header.count(name) > 1 for name in COLUMNS) or "prompt" not in header:
                raise ValueError(
                    f"{where}: expected a header with a column `prompt` and no column twice; received "
                    f"{', '.join(header)}.{_cause(header)}"
                )
        elif len(cells) > len(header):
            raise ValueError(
                f"{where}: {len(cells)} values for {len(header)} columns ({', '.join(header)}); a prompt that "
                "contains a comma must stand in double quotes"
            )
        else:
            yield where, dict(zip(header, cells, strict=False))


def _cause(header: Sequence[str]) -> str:
    """Say what is most often wrong with a header."""
    if any(mark in cell for cell in header for mark in ";\t"):
        return " Excel separates columns by semicolons in many languages: save it as CSV UTF-8 with commas."
    if any(name.lower() == "prompt" for name in header):
        return " Names of columns are in lower case: write `prompt`."
    return " Prompts alone, one in each line, are read from a .txt file."


def _prompt(row: dict[str, str], position: int, path: Path, where: str, image_root: str | Path | None) -> Prompt:
    """Build the prompt of one row; `position` is its index where the row gives none."""
    if not row.get("prompt"):
        raise ValueError(f"{where}: the prompt is blank; write one or delete the row")
    numbers: dict[str, int | None] = {}
    for column in ("index", "seed"):
        cell = row.get(column, "")
        is_number = cell.isascii() and cell.isdigit() and len(cell) <= 19 and int(cell) < 2**63
        if column == "seed" and cell and not is_number:
            raise ValueError(f"{where}: seed must be a whole number in [0, 2^63) or empty; received {cell[:40]!r}")
        numbers[column] = int(cell) if is_number else None
        if cell and not is_number:  # an index that is a name gets a number in [2^62, 2^63), far from those of people
            numbers[column] = 2**62 + int.from_bytes(hashlib.sha256(cell.encode()).digest()[:7])
    image = None
    if row.get("ref_image_path"):
        given = Path(with_home(row["ref_image_path"]))
        image = path.parent / given
        if not os.path.isfile(image) and os.path.isfile(given):  # which also say no to a name that no file can have
            _LOG.warning(
                "%s: ref_image_path %s is not beside its file and taken from the working directory", where, given
            )
            image = given
        if not os.path.isfile(image):
            raise ValueError(
                f"{where}: ref_image_path: there is no file {str(image)!r}, nor {str(given)!r} in the working directory"
            )
    if image is not None and image_root is not None and not image.resolve().is_relative_to(Path(image_root).resolve()):
        raise ValueError(f"{where}: ref_image_path {str(image)!r} lies outside of image_root {str(image_root)!r}")
    index = position if numbers["index"] is None else numbers["index"]
    return Prompt(row["prompt"], index, numbers["seed"], None if image is None else str(image))
