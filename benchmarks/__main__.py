"""Run the benchmarks of this machine, compare them with the committed results of its kind, and write both down.

`make bench` runs all; `python -m benchmarks --only attention parts` some. With a GPU everything runs there.
The exit status is 1 when something became slower.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention, checkpoints, grpo_step, parts
from benchmarks.paired import Result, machine_kind, on_shared_cpu, print_results
from scripts.reports.markdown import markdown_table, replace_part

BENCHMARKS: dict[str, Callable[[], list[Result]]] = {
    "attention": attention.measure,
    "parts": parts.measure,
    "checkpoints": checkpoints.measure,
    "grpo_step": grpo_step.measure,
}

WAITING = "checkpoints"
"""A benchmark of waiting, which `--shared` leaves out: it measures CPU seconds, and waiting costs none."""

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
TOLERANCE = 0.1
"""Share by which a median may fall before it can count as slower; the quartiles must not overlap either."""


def main(argv: Sequence[str]) -> int:
    """Run, print, write; returns the exit status."""
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="some of them")
    parser.add_argument("--shared", action="store_true", help="a CPU that others use: one thread, its CPU seconds")
    arguments = parser.parse_args(argv)
    names = arguments.only
    if arguments.shared:
        on_shared_cpu()
        names = [name for name in names if name != WAITING]
        print(f"{WAITING} is left out: waiting costs no CPU seconds")
    if not names:
        parser.error("none of the benchmarks can run here")
    kind = machine_kind()
    before, results = read_results(kind), []
    for name in names:
        measured = BENCHMARKS[name]()
        print_results(measured)
        path = write_results(kind, measured)  # at once: what follows may fail
        results += measured
    print(f"\nAgainst the committed results of {kind}:")
    verdicts = {result.name: verdict(result, before) for result in results}
    for name, said in verdicts.items():
        print(f"  {name}: {said}")
    write_table(kind, read_results(kind))
    print(f"written: {path} and its table in docs/performance.md")
    return 1 if "slower" in verdicts.values() else 0


def read_results(kind: str) -> dict[str, Any]:
    """Return the committed results of a kind of machine by name; none when there are none."""
    path = RESULTS / f"{kind}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else {}


def write_results(kind: str, results: Sequence[Result]) -> Path:
    """Write `<kind>.json`; results of benchmarks that did not run this time are kept."""
    entries = read_results(kind) | {result.name: result.as_json() for result in results}
    path = RESULTS / f"{kind}.json"
    text = json.dumps({"machine": kind, "torch": torch.__version__, "results": dict(sorted(entries.items()))}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def verdict(result: Result, before: Mapping[str, Any]) -> str:
    """Say how a result compares with the committed one: `new`, `as before`, `faster` or `slower`.

    Faster and slower are said where the medians differ by more than `TOLERANCE` and the ranges between the quartiles
    do not overlap.
    """
    if result.name not in before:
        return "new"
    then, here = before[result.name]["ratio"], result.ratio
    if here.median < (1 - TOLERANCE) * then["median"] and here.high < then["low"]:
        return "slower"
    if here.median > (1 + TOLERANCE) * then["median"] and here.low > then["high"]:
        return "faster"
    return "as before"


def write_table(kind: str, entries: Mapping[str, Any], document: Path = DOCUMENT) -> None:
    """Put the ratios of a kind of machine between its markers in the document; a new kind is added at the end."""
    rows = []
    for name, entry in entries.items():
        rows.append((name, entry["compares"], "**{median:.2f}** ({low:.2f} - {high:.2f})".format(**entry["ratio"])))
    text = document.read_text(encoding="utf-8")
    if f"<!-- {kind} -->" not in text:
        text = f"{text.rstrip()}\n\n### {kind}\n"
    table = markdown_table(("benchmark", "baseline / ours", "ratio (quartiles)"), rows)
    document.write_text(replace_part(text, kind, table), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
