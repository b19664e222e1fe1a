"""Run a launcher's script, and after a lost rank or node run it again from the last checkpoint.

Usage: `python -m scripts.post_train.restarts SCRIPT [flags]` in the project's folder. `--max_restarts N`, or else
MAX_RESTARTS, says how often; SCRIPT does not get that flag. It may write what was lost to the file TRAIN_LOST_FILE.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from hyvideo.config.outside import complain
from hyvideo.distributed import HANGS
from hyvideo.observability.metrics import read_rows, stretches_in_words
from hyvideo.training.stop_signal import LOST, PREEMPTED, listened_preemptions

SHORTEST, LONGEST = 5, 600
"""Seconds before a restart: the shortest pause, doubled while no new checkpoint comes, at most the longest."""

ASKED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
"""Exit statuses of what somebody has ended; above 128 the others are of crashes, kills and lost connections (255)."""


def main(argv: list[str]) -> int:
    """Run the script, at most `max_restarts` times more.

    Returns:
        Its last exit status; in a pause 130 after Ctrl-C, and 75 if asked to stop otherwise.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max_restarts", nargs="?", const="", default=os.environ.get("MAX_RESTARTS", "0"))
    given, words = parser.parse_known_args(argv)
    if not (given.max_restarts.isascii() and given.max_restarts.isdecimal()):
        complain(
            "--max_restarts (MAX_RESTARTS) must be a whole number from 0, the most restarts after a lost rank or node; "
            f"received {given.max_restarts!r}. Write --max_restarts 3, for example."
        )
        return 2
    most, folder, resume = int(given.max_restarts), _run_folder(words), []
    afresh = "--resume_from_checkpoint=" in words or ("--resume_from_checkpoint", "") in itertools.pairwise(words)
    if not most:
        os.execvp("bash", ["bash", *words])
    before, saved, pause = _written(folder), -1, SHORTEST
    asked: list[int] = []
    launcher = None

    def ask(number: int, frame: object) -> None:
        """Pass a signal on as a terminal does: the launcher, in a session of its own, does not get the terminal's."""
        asked.append(number)
        with suppress(ProcessLookupError):
            if launcher and launcher.returncode is None:
                os.killpg(launcher.pid, number)

    for number in (signal.SIGINT, *listened_preemptions()):
        signal.signal(number, ask)
    with TemporaryDirectory(prefix="restarts-") as temporary:
        lost = Path(temporary) / "lost"
        os.environ["TRAIN_LOST_FILE"] = str(lost)
        for restart in itertools.count(1):
            launcher = subprocess.Popen(["bash", *words, *resume], start_new_session=True)
            status = launcher.wait()
            status = status if status >= 0 else 128 - status
            if asked or not (status == LOST or (status > 128 and status not in ASKED)):
                return status
            what = lost.read_text().strip() if lost.exists() else f"the launcher ended with status {status}"
            lost.unlink(missing_ok=True)
            if hang := _hang(folder):  # whoever was lost first has only noticed it
                what = f"{hang} ({what})"
            if restart > most or _written(folder) == before:
                why = f"all {most} restarts are used up"
                if restart <= most:
                    why = f"the run had not begun, for nothing was written to {folder}/console.log"
                complain(f"lost: {what}. Not restarted: {why}.")
                return status
            step, work = _lost_work(folder)
            pause, saved = SHORTEST if step > saved else min(2 * pause, LONGEST), step
            told = f"restart {restart} of {most} in {pause} s, from step {step}: {what}. Lost: {work}."
            complain(told)
            with suppress(OSError), (folder / "console.log").open("a", encoding="utf-8") as log:
                log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {told}\n")
            end = time.monotonic() + pause
            while time.monotonic() < end:
                if asked:
                    return PREEMPTED if asked[0] != signal.SIGINT else 128 + signal.SIGINT
                time.sleep(0.1)
            os.environ["PREFLIGHT"] = "0"
            if step or afresh:
                resume = ["--resume_from_checkpoint", "latest"]
            else:  # the same command again: `latest` would forget the other run's checkpoint that it began with
                os.environ["RESUME_FROM_CHECKPOINT"] = os.environ.get("RESUME_FROM_CHECKPOINT") or "latest"


def _run_folder(words: list[str]) -> Path:
    """The run folder of a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_dir")
    if given := parser.parse_known_args(words)[0].output_dir:
        return Path(given).expanduser()
    command = ["bash", "scripts/post_train/run_folder.sh", os.environ["CONFIG"]]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.removesuffix("\n"))


def _written(folder: Path) -> int:
    """When the run's `console.log` was last written, in ns; 0 where this machine sees none."""
    log = folder / "console.log"
    return log.stat().st_mtime_ns if log.exists() else 0


def _hang(folder: Path) -> str:
    """Who did not come, and to what, by the last line of the run's `console.log`; empty where it ends otherwise."""
    log = folder / "console.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return text.rstrip("\n").rpartition("\n")[2].partition(HANGS)[2].removesuffix(".")


def _lost_work(folder: Path) -> tuple[int, str]:
    """The update of the last checkpoint (0: none), and in words what was made after it."""
    latest, metrics = folder / "checkpoints" / "latest", folder / "metrics.jsonl"
    step = int(latest.read_text().removeprefix("step_")) if latest.is_file() else 0
    gone = [row for row in read_rows(metrics)[0] if row["step"] > step] if metrics.is_file() else []
    if not gone:
        return step, "only the round in progress"
    seconds = sum(value for row in gone for name, value in row.items() if name.startswith("time/"))
    updates = stretches_in_words([(step + 1, int(gone[-1]["step"]))])
    return step, f"updates {updates} ({seconds / 60:.1f} minutes) and the round in progress"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
