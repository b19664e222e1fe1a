"""What a run tells: console, metrics and trackers, report, and the watchers that read along."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hyvideo.algorithms.algorithm import Trajectory
from hyvideo.config.outside import in_words
from hyvideo.observability.console import Console, validation_line
from hyvideo.observability.metrics import MetricsLog, read_metrics
from hyvideo.observability.profiling import Profile
from hyvideo.observability.scored_videos import read_scored_videos, scored_steps
from hyvideo.observability.watchdog import Watchdog
from hyvideo.training.guard import ReplayWatch, RewardWatch
from hyvideo.training.performance import Performance

TRACKED_VIDEOS = 8
"""Validation videos sent to trackers each time."""


@dataclass(eq=False)
class Journal:
    """Writes one row per update, and what people read of them.

    Only the main rank has `metrics`, and `profile` is None where the run is not profiled. `report` is called with the
    run folder after a save; None writes no report.
    """

    folder: Path
    console: Console
    metrics: MetricsLog | None
    performance: Performance
    profile: Profile | None
    watchdog: Watchdog
    replay_watch: ReplayWatch
    reward_watch: RewardWatch = field(default_factory=RewardWatch)
    report: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        own = self.metrics and self.metrics.path.is_file()
        rows = read_metrics(self.metrics.path) if own else []  # those before a resume
        for row in {row["round"]: row for row in rows if "round" in row}.values():  # the last row of each round
            self.reward_watch.observe(row)
        samples = scored_steps(self.folder / "samples") if own else {}
        self._validations = []
        for folder in samples.values():
            rewards = [video.reward for video in read_scored_videos(folder) if math.isfinite(video.reward)]
            self._validations.append(sum(rewards) / len(rewards) if rewards else math.nan)

    def row(self, trajectory: Trajectory, metrics: dict[str, float], times: dict[str, float]) -> dict[str, float]:
        """Return the whole row of an update: the round's numbers, the update's, and the seconds of its phases."""
        performance = self.performance.row(trajectory, metrics.get("update/evaluations", 0.0), times)
        return {**trajectory.metrics, **metrics, "round": trajectory.round, **times, **performance}

    def log(self, step: int, row: dict[str, float], *, round_ends: bool) -> None:
        """Write the row of update `step`, and warn if the rounds so far look as if the reward were exploited."""
        if self.metrics:
            self.metrics.log(step, row)
        self.console.progress(step, row, round_ends=round_ends)
        if round_ends and (failed := row.get("reward/failed", 0)):
            self.console.main_warning(
                f"{failed:.0f} videos of the round that ended with update {step} could not be scored and are left out "
                "(reward/failed)."
            )
        if "valid/reward" in row:
            self.tell_validation(step, row["valid/reward"])
        if round_ends and (warning := self.reward_watch.observe(row)):
            self.console.main_warning(warning)

    def tell_validation(self, step: int, reward: float) -> None:
        """Say what a validation found."""
        self._validations.append(reward)
        self.console.info(validation_line(step, self._validations))

    def log_videos(self, step: int, folder: Path) -> None:
        """Send the first validation videos of `folder` to the trackers."""
        if self.metrics and self.metrics.trackers:
            self.metrics.trackers.log_videos(step, read_scored_videos(folder)[:TRACKED_VIDEOS])

    def write_report(self) -> None:
        """Report what is in the run folder; if that cannot be written, training goes on."""
        if not (self.report and self.metrics and self.metrics.path.exists()):
            return
        try:
            self.report(self.folder)
        except (OSError, ValueError) as error:
            self.console.warning(f"report.html was not written: {in_words(error)}")

    def finish(self) -> None:
        """Close what the run wrote to, and say where its report is."""
        if self.profile:
            self.profile.finish()
        if self.metrics:
            self.metrics.close()
            if self.report:
                self.console.info(f"report: {self.folder / 'report.html'}")
