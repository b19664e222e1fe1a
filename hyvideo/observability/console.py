"""What a person sees while a run trains: one live line in a terminal, plain lines everywhere else."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from hyvideo.config.outside import printable
from hyvideo.observability.phase_timer import PHASES

COMMAND = "command: "
"""Beginning of the console line that says how the run was started."""

SLOWEST = "slowest "
"""Beginning of the part of a line of progress that names the slowest rank."""

_BARS = "▁▂▃▄▅▆▇█"


class Console:
    """Messages and progress of one process. Rank 0 prints and keeps `console.log`; other ranks only warn.

    In a terminal the progress is one line that rewrites itself at every update. Without one (a pipe, a batch job) it is
    a plain line per round, or per `log_interval` updates where a round has fewer, with the shares of the time since the
    line before; the last update always has its line. `console.log` in the run folder gets the plain lines either way,
    with date and time.
    """

    def __init__(self, run_dir: Path, rank: int, *, log_interval: int = 1) -> None:
        self._rank = rank
        self._log_interval = log_interval
        self._bar: tqdm | None = None
        self._path, self._log_file = run_dir / "console.log", None
        self._first_step, self._max_steps, self._started = 0, 0, time.monotonic()
        self._printed, self._seconds = 0, dict.fromkeys(PHASES, 0.0)  # until the last plain line, and since
        if rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            self.keep_log()

    def keep_log(self) -> None:
        """Append to `console.log` from now on, as rank 0 does: for a rank that answers where rank 0 does not."""
        if self._log_file is None:
            self._log_file = self._path.open("a", encoding="utf-8", buffering=1)

    def info(self, message: str) -> None:
        """Log a message once for all ranks: rank 0 prints it, the others stay silent."""
        if self._rank == 0:
            self._write(message)

    def warning(self, message: str) -> None:
        """Warn of something that may need a person; every rank prints, naming itself unless it is rank 0."""
        self._write(f"WARNING{f' (rank {self._rank})' if self._rank else ''}: {message}")

    def error(self, message: str) -> None:
        """Say why the run ends; every rank prints, as in `warning`."""
        self._write(f"ERROR{f' (rank {self._rank})' if self._rank else ''}: {message}")

    def main_warning(self, message: str) -> None:
        """Warn once for all ranks: rank 0 prints it, the others stay silent."""
        if self._rank == 0:
            self.warning(message)

    def start_progress(self, step: int, max_steps: int) -> None:
        """Begin counting: `step` updates were done before (0, or the restored step) of `max_steps` in all."""
        self._first_step, self._max_steps, self._started = step, max_steps, time.monotonic()
        self._printed = step
        if self._rank == 0 and sys.stderr.isatty():
            layout = "{percentage:3.0f}%|{bar:10}| {desc}"
            self._bar = tqdm(total=max_steps, initial=step, bar_format=layout, dynamic_ncols=True, file=sys.stderr)

    def progress(self, step: int, metrics: Mapping[str, float], *, round_ends: bool = True, slowest: str = "") -> None:
        """Show update `step` with the metrics of its row in `metrics.jsonl`; names that are missing are left out.

        `slowest` is the last round's slowest rank, in words.
        """
        if self._rank != 0:
            return
        for phase in PHASES:
            self._seconds[phase] += metrics.get(f"time/{phase}", 0.0)
        seconds_per_step = (time.monotonic() - self._started) / max(step - self._first_step, 1)
        line = progress_line(step, self._max_steps, metrics, self._seconds, seconds_per_step)
        if slowest:
            line += f" | {SLOWEST}{slowest}"
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_description_str(line)
        due = step // self._log_interval > self._printed // self._log_interval or step >= self._max_steps
        if round_ends and due:
            if self._bar is None:
                _print(line)
            self._log_line(line)
            self._printed, self._seconds = step, dict.fromkeys(PHASES, 0.0)

    def close(self) -> None:
        """End the live line and close `console.log`."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None

    def _write(self, message: str) -> None:
        message = printable(message)
        with suppress(OSError):
            tqdm.write(message, file=sys.stderr)  # keeps a live line intact
        self._log_line(message)

    def _log_line(self, message: str) -> None:
        if self._log_file is None:
            return
        try:
            self._log_file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {message}\n")
        except OSError as error:  # a log for people must not end the run
            with suppress(OSError):
                self._log_file.close()
            self._log_file = None
            _print(f"WARNING: console.log ends here ({error})")


def _print(line: str) -> None:
    """Print to stderr; a reader that has ended (`2>&1 | tee`, and Ctrl-C) must not end the run."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def progress_line(
    step: int, max_steps: int, metrics: Mapping[str, float], seconds: Mapping[str, float], seconds_per_step: float
) -> str:
    """One update, as `step 12/120, 06:07 left | reward +0.314 | kl 1.2e-05 | 3.4 s/step: rollout 65% update 35%`."""
    time_left = tqdm.format_interval(int(seconds_per_step * max(max_steps - step, 0)))
    parts = [f"step {step}/{max_steps}, {time_left} left"]
    if math.isfinite(metrics.get("reward/mean", math.nan)):
        parts.append(f"reward {metrics['reward/mean']:+.3f}")
    if math.isfinite(metrics.get("kl/position", math.nan)):
        parts.append(f"kl {metrics['kl/position']:.1e}")
    pace = f"{seconds_per_step:.3g} s/step"
    if total := sum(seconds.values()):
        pace += ": " + " ".join(f"{phase} {value / total:.0%}" for phase, value in seconds.items() if value)
    return " | ".join([*parts, pace])


def validation_line(step: int, rewards: Sequence[float]) -> str:
    """One validation in one line, such as `valid at 48: reward -0.12 (+0.13 since start) ▁▃▄▆█`.

    `rewards` are of all validations so far, this one last; NaN where no video could be scored.
    """
    if not math.isfinite(rewards[-1]):
        return f"valid at {step}: no video could be scored"
    line = f"valid at {step}: reward {rewards[-1]:+.2f}"
    known = [reward for reward in rewards if math.isfinite(reward)]
    if len(known) == 1:
        return line
    low, high = min(known), max(known)
    levels = [round((value - low) / (high - low) * (len(_BARS) - 1)) if high > low else 0 for value in known]
    curve = "".join(_BARS[level] for level in levels[-40:])
    return f"{line} ({rewards[-1] - known[0]:+.2f} since start) {curve}"
