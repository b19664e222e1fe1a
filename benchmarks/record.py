"""Results on disk: one JSON per kind of machine, its table in the documents, and what has become slower since."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.paired import Result
from scripts.reports.markdown import markdown_table, write_part

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
TOLERANCE = 0.1
"""Share by which a median may fall before it can count as slower; the quartiles must not overlap either."""


def read_results(kind: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the committed results of a kind of machine by name; none when there are none."""
    path = folder / f"{kind}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else {}


def write_results(kind: str, results: Sequence[Result], folder: Path = RESULTS) -> Path:
    """Write `<kind>.json`; results of benchmarks that did not run this time are kept."""
    entries = read_results(kind, folder) | {result.name: result.as_json() for result in results}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.json"
    text = json.dumps({"machine": kind, "torch": torch.__version__, "results": dict(sorted(entries.items()))}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def verdict(result: Result, before: Mapping[str, Any]) -> str:
    """Say how a result compares with the committed one: `new`, `as before`, `faster` or `slower`.

    Faster and slower are said where the medians differ by more than `TOLERANCE` and the ranges between the quartiles
    do not overlap.
    """
    known = before.get(result.name)
    if not known or not known["ratio"] or not result.ratio:
        return "new" if not known else "as before"
    then, here = known["ratio"], result.ratio
    if here.median < (1 - TOLERANCE) * then["median"] and here.high < then["low"]:
        return "slower"
    if here.median > (1 + TOLERANCE) * then["median"] and here.low > then["high"]:
        return "faster"
    return "as before"


def table(entries: Mapping[str, Any]) -> str:
    """Write results as a Markdown table; what lies behind a ratio stays in the JSON."""
    rows = []
    for name, entry in entries.items():
        if ratio := entry["ratio"]:
            shown = f"**{ratio['median']:.2f}** ({ratio['low']:.2f} - {ratio['high']:.2f})"
        else:
            shown = ", ".join(f"{key} {value:g}" for key, value in entry["facts"].items())
        rows.append((name, entry["compares"], shown))
    return markdown_table(("benchmark", "baseline / ours", "ratio (quartiles)"), rows)


def write_table(kind: str, entries: Mapping[str, Any], document: Path = DOCUMENT) -> None:
    """Put the table of a kind of machine between its markers in the document; a new kind is added at the end."""
    write_part(document, kind, table(entries), heading=kind)
