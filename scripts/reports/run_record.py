"""A run folder, read back: its curves, its videos, its settings and what went wrong."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from hyvideo.config.loading import load_saved_config
from hyvideo.config.schema import Config
from hyvideo.observability.console import COMMAND, SLOWEST
from hyvideo.observability.metrics import missing_updates, read_rows
from hyvideo.observability.phase_timer import PHASES
from hyvideo.observability.scored_videos import TOO_LARGE, ScoredVideo, read_scored_videos, scored_steps

ALARMS = {"flaws of the reward": "May exploit its reward", "drift_guard: videos": "Videos become alike"}
"""Part of a warning -> what it says in short."""

_NOT_METRICS = ("mean", "std", "failed", "groups_without_spread", "over_base")

VideosByStep = Mapping[int, tuple[ScoredVideo, ...]]


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds, complete or not.

    Attributes:
        columns: metric name to its values [N], one per logged update, NaN where it is missing; `step` is among them,
            and `seconds`, the sum of its phases.
        gaps: stretches of updates between the logged ones whose rows are missing, first and last of each.
        samples: validation videos by the update they were made after.
        rounds: training videos of the rounds that were kept, by the update they began after.
        command, commit: that started or last resumed it, and of the code it ran; empty when not known.
        slowest: the last round's slowest rank with its host, in words; empty when not known.
        warnings: lines of the console log that say WARNING, oldest first.
        problems: files that are missing or damaged, in words.
        num_discarded: logged updates that a resume made again.
        updated: when a metric was last written; None without metrics.
    """

    name: str
    folder: Path
    columns: Mapping[str, np.ndarray]
    gaps: tuple[tuple[int, int], ...]
    samples: VideosByStep
    rounds: VideosByStep
    config: Config | None
    command: str
    commit: str
    slowest: str
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    num_discarded: int
    updated: datetime | None

    @property
    def num_updates(self) -> int:
        """The last logged update; 0 before the first."""
        return int(self.columns["step"][-1]) if len(self.columns["step"]) else 0

    @property
    def metric_names(self) -> list[str]:
        """The reward's components, such as VQ, MQ and TA."""
        names = [name.removeprefix("reward/") for name in self.columns if name.startswith("reward/")]
        order = {"VQ": 0, "MQ": 1, "TA": 2}
        return sorted((n for n in names if n not in _NOT_METRICS), key=lambda name: (order.get(name, 3), name))

    @property
    def alarms(self) -> dict[str, str]:
        """The newest warning of each kind of ALARMS, by what it says in short."""
        lines = [(short, line) for line in self.warnings for part, short in ALARMS.items() if part in line]
        return {short: line.partition("WARNING: ")[2] for short, line in lines}

    def until(self, step: int) -> "RunRecord":
        """Return the record without the rows and validation videos of later updates."""
        kept = self.columns["step"] <= step
        columns = {name: values[kept] for name, values in self.columns.items()}
        return replace(self, columns=columns, samples={n: v for n, v in self.samples.items() if n <= step})

    def column(self, name: str) -> np.ndarray:
        """Values [N] of a metric, all NaN when it was never logged."""
        return self.columns.get(name, np.full(len(self.columns["step"]), np.nan))

    def per_round(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric that all updates of a round share, or only its last one has: one point each."""
        rounds = self.column("round")
        first = np.ones(len(rounds), dtype=bool)
        first[1:] = ~(rounds[1:] == rounds[:-1])  # without rounds, NaN: every row
        shared, at_end = self.column(name)[first], self.column(name)[np.roll(first, -1)]
        return self.columns["step"][first], np.where(np.isfinite(shared), shared, at_end)

    def validation(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and mean scores of the validations (`reward` or a metric), failed scores left out."""
        points: dict[int, float] = {}
        for step, videos in self.samples.items():
            scores = np.array([video.scores.get(name, math.nan) for video in videos])
            if np.isfinite(scores).any():
                points[step] = scores[np.isfinite(scores)].mean()
        logged = zip(self.columns["step"], self.column(f"valid/{name}"), strict=True)
        points |= {int(step): value for step, value in logged if np.isfinite(value)}
        return np.array(sorted(points), dtype=float), np.array([points[step] for step in sorted(points)], dtype=float)


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """Read a run folder, whose name is also the run's by default; the run may be in progress, or have been killed.

    Raises:
        ValueError: there is no `metrics.jsonl`.
    """
    folder = Path(folder)
    problems: list[str] = []
    rows, unreadable = read_rows(folder / "metrics.jsonl")
    if unreadable:
        listed = ", ".join(str(number) for number in unreadable)
        problems.append(f"metrics.jsonl: no row in line {listed}; a killed run can leave a torn last line.")
    discarded, console = folder / "metrics.discarded.jsonl", folder / "console.log"
    log = console.read_text(encoding="utf-8", errors="replace").split("\n") if console.is_file() else []
    config, videos = _read_config(folder / "config.yaml", problems), {"samples": {}, "rollouts": {}}
    for kind, of_kind in videos.items():
        for step, path in scored_steps(folder / kind).items():
            try:
                of_kind[step] = read_scored_videos(path)
            except (ValueError, OSError) as error:
                problems.append(str(error))
    named = (rf"^[\d-]+ [\d:]+ {COMMAND}(.*)", r"\(commit (\w+(?:-dirty)?)\)$", rf" \| {SLOWEST}(.*)$")
    last = [next((found[1] for line in reversed(log) if (found := re.search(name, line))), "") for name in named]
    steps = [int(row["step"]) for row in rows]
    names = dict.fromkeys(["step", *(name for row in rows for name in row)])
    seconds = np.sum([column_of(rows, f"time/{phase}") for phase in PHASES], axis=0)
    return RunRecord(
        name=name or folder.resolve().name,
        folder=folder,
        columns={name: column_of(rows, name) for name in names} | {"seconds": seconds},
        gaps=tuple(missing_updates(steps, min(steps), max(steps))) if steps else (),
        samples=videos["samples"],
        rounds=videos["rollouts"],
        config=config,
        command=last[0],
        commit=last[1],
        slowest=last[2],
        warnings=tuple(line for line in log if re.match(r"[\d-]+ [\d:]+ WARNING", line)),
        problems=tuple(problems),
        num_discarded=len(read_rows(discarded)[0]) if discarded.is_file() else 0,
        updated=datetime.fromtimestamp((folder / "metrics.jsonl").stat().st_mtime) if rows else None,
    )


def column_of(rows: Sequence[Mapping[str, float]], name: str) -> np.ndarray:
    """Return a metric's values [N], NaN where it is missing or TOO_LARGE."""
    values = np.array([row.get(name, math.nan) for row in rows], dtype=float)
    return np.where(np.abs(values) < TOO_LARGE, values, math.nan)


def _read_config(path: Path, problems: list[str]) -> Config | None:
    try:
        if path.is_file():
            return load_saved_config(path)
        problems.append("config.yaml is missing: settings and sampler are not shown.")
    except ValueError as error:
        problems.append(f"The settings cannot be read: {error}")
    return None
