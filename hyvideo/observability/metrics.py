"""The run's numbers: a JSON object per update in `metrics.jsonl` and for trackers, and one per scored video."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import from_json, to_json

from hyvideo.config.outside import read_file
from hyvideo.data.files import LOCK, claim, replace_synced, writing

if TYPE_CHECKING:
    from hyvideo.observability.trackers import Trackers

METRIC_MEANINGS = {"VQ": "visual quality", "MQ": "motion quality", "TA": "text alignment"}
"""What the paper's reward components measure."""


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the rows of a `metrics.jsonl` in file order as `read_rows`; a ValueError if a line is not one."""
    rows, unreadable = read_rows(path)
    for number, line in unreadable.items():
        raise ValueError(
            f"{path}, line {number}: expected a JSON object with 'step', received {line[:80]!r}. "
            "A killed run can leave a torn last line; resuming the run moves it to metrics.discarded.jsonl."
        )
    return rows


def read_rows(path: Path) -> tuple[list[dict[str, float]], dict[int, bytes]]:
    """Read the rows of a `metrics.jsonl` that may be growing, or torn by a kill; a JSON null comes back as NaN.

    Returns the rows in file order, and the lines that are not rows, by their number.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"No metrics at {path}: expected the metrics.jsonl of a run folder.")
    rows, unreadable = [], {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        row = _parse_row(line)
        if row is None:
            unreadable[number] = line
        else:
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows, unreadable


def missing_updates(steps: Iterable[int], first: int, last: int) -> list[tuple[int, int]]:
    """Return the stretches of [first, last] that `steps` leave out, each as its own first and last update."""
    known = sorted({step for step in steps if first <= step <= last})
    return [(before + 1, after - 1) for before, after in pairwise([first - 1, *known, last + 1]) if after - before > 1]


def stretches_in_words(stretches: Sequence[tuple[int, int]]) -> str:
    """Write stretches of updates, the first eight in full: `3, 7 to 9`."""
    listed = [f"{first} to {last}" if last > first else str(first) for first, last in stretches[:8]]
    more = len(stretches) - len(listed)
    return ", ".join(listed) + (f" and {more} more stretches" if more else "")


class MetricsLog:
    """Append-only log of one run, written by rank 0.

    A row is on disk when `log` returns, so a checkpoint never knows more than the log. Rows come in increasing order of
    step. Whatever is not a row (the torn last line of a killed process) moves to `metrics.discarded.jsonl` on opening.
    Until it is closed no other process can open one there: a ValueError. Trackers get every row, nulls as NaN.
    """

    def __init__(self, run_dir: Path, trackers: "Trackers | None" = None) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        self.discarded_path = run_dir / "metrics.discarded.jsonl"
        self.trackers = trackers
        self._claim = claim(run_dir)
        self._keep_rows_up_to(math.inf)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the row of one update. NaN and infinities become null, since strict JSON has no word for them.

        A value may be a 0-dim tensor. A ValueError if a value is named "step"; an OSError if the row cannot be written,
        or the folder was removed: a new one would not hold the rows before.
        """
        if not (lock := self.path.with_name(LOCK)).exists():
            raise FileNotFoundError(errno.ENOENT, "the run's folder was removed or moved while it trained", str(lock))
        if "step" in values:
            raise ValueError(f"The name 'step' is taken by the update's number; received a metric 'step' at {step}.")
        numbers = {name: float(values[name]) for name in sorted(values)}
        row = {"step": step} | {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        append_lines(self.path, [json.dumps(row, allow_nan=False)])
        if self.trackers:
            self.trackers.log(step, numbers)

    def truncate_after(self, step: int, began_at: int = 0) -> list[str]:
        """Move the rows after `step`, which a resumed run will produce again, to `metrics.discarded.jsonl`.

        Killed at any moment this loses no row, and calling it again completes it. `step` is that of the restored
        checkpoint, 0 without one; `began_at` the one before the folder's first row. Returns what a person should know:
        that the run begins again, and which rows up to `step` were lost.
        """
        known = [int(row["step"]) for row in read_metrics(self.path)] if self.path.is_file() else []
        self._keep_rows_up_to(step)
        told = []
        if step == began_at and max(known, default=step) > step:
            told.append(
                f"{len(known)} updates were logged here, but no checkpoint has them: the run begins again at update "
                f"{step + 1}, and the old rows are in {self.discarded_path}."
            )
        if missing := missing_updates(known, began_at + 1, step):
            told.append(
                f"{self.path} has no row of updates {stretches_in_words(missing)}: these rows were lost, and the "
                "report will show a gap. The training itself goes on as if nothing had happened."
            )
        return told

    def close(self) -> None:
        """End the trackers, and leave the folder to others."""
        self._claim.close()
        if self.trackers:
            self.trackers.close()

    def _keep_rows_up_to(self, step: float) -> None:
        """Split the file into rows up to `step` and the rest, which moves away."""
        keep_rows(self.path, self.discarded_path, step, lambda line: (_parse_row(line) or {}).get("step"))


def keep_rows(path: Path, discarded_path: Path, last: float, step_of: Callable[[bytes], int | None]) -> None:
    """Keep the lines of a log up to the step `last`, and move the rest to another file.

    `step_of` gives the step of a line, None where it is not a row. Killed at any moment this loses no line.
    """
    lines = read_file(path, None).splitlines() if path.exists() else []
    steps = [step_of(line) for line in lines]
    keep = [step is not None and step <= last for step in steps]
    moved = b"".join(line + b"\n" for line, kept in zip(lines, keep, strict=True) if not kept)
    if moved:
        discarded = read_file(discarded_path, None) if discarded_path.exists() else b""
        if not discarded.endswith(moved):  # else: killed below, after the copy and before the cut
            replace_synced(discarded_path, discarded + moved)
    kept_lines = b"".join(line + b"\n" for line, kept in zip(lines, keep, strict=True) if kept)
    if lines and kept_lines != path.read_bytes():
        replace_synced(path, kept_lines)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file; they are on disk when this returns."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def append_scores(folder: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append what the videos of a round scored to `scores.jsonl`, a row each, which holds the round's last `step`.

    A number that is not finite, as of a failed score, becomes null.
    """
    folder.mkdir(parents=True, exist_ok=True)
    append_lines(folder / "scores.jsonl", (to_json(row, inf_nan_mode="null").decode() for row in rows))


def discard_scores_after(folder: Path, step: int) -> None:
    """Move the rows of rounds that ended after `step`, and a torn line, to `scores.discarded.jsonl`."""

    def step_of(line: bytes) -> int | None:
        with suppress(ValueError, TypeError, KeyError):
            return int(from_json(line)["step"])
        return None

    keep_rows(folder / "scores.jsonl", folder / "scores.discarded.jsonl", step, step_of)


def _parse_row(line: bytes) -> dict[str, float | None] | None:
    """The row of a line, or None if the line is not one: its values are null, or what a float can hold."""
    with suppress(ValueError):
        row = from_json(line)
        if isinstance(row, dict) and type(row.get("step")) is int and abs(row["step"]) < 2**63:
            values = [value for value in row.values() if value is not None and type(value) is not float]
            return row if all(type(value) is int and abs(value) < 2**1023 for value in values) else None
    return None
