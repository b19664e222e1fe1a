"""The folder of a run: who may write there, and from which checkpoint it continues."""

from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from hyvideo.checkpoint.train_state import latest_checkpoint, read_facts
from hyvideo.config.schema import RunConfig
from hyvideo.data.files import LOCK

FOLDERS = ("checkpoints", "rollouts", "samples", "tb", "discarded", "profile")
FILES = ("console.log", "metrics.jsonl", "metrics.discarded.jsonl", "config.yaml", "report.html", LOCK)
"""What a run writes, by name."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes.

    Attributes:
        path: the folder.
        resume_from: checkpoint to restore first; None starts afresh.
    """

    path: Path
    resume_from: Path | None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """Folder of videos made in training."""
        return self.path / "rollouts"

    @property
    def samples(self) -> Path:
        """Folder of validation videos."""
        return self.path / "samples"

    def discard_after(self, step: int) -> None:
        """Move the videos of a policy after `step` to `discarded/`: a run that goes on from `step` makes others."""
        for videos in (self.samples, self.rollouts):
            for folder in videos.glob("step_*"):
                number = folder.name.removeprefix("step_")
                if number.isdecimal() and int(number) > step:
                    discarded = self.path / "discarded" / videos.name
                    places = (discarded / f"{folder.name}{f'.{again}' if again else ''}" for again in count())
                    place = next(place for place in places if not place.exists())
                    place.parent.mkdir(parents=True, exist_ok=True)
                    folder.rename(place)


def open_run_folder(config: RunConfig, now: datetime | None = None) -> RunFolder:
    """Choose the run folder, which the run's first file makes, and find the checkpoint to resume from.

    Args:
        config: `output_dir`, `run_name`, `resume_from_checkpoint` and `max_steps` are read.
        now: time for the default name.

    Raises:
        ValueError: the folder holds another run and `resume_from_checkpoint` is not given, or something else where the
            run writes, or the checkpoint to resume from cannot be read.
    """
    default = Path("outputs") / f"{config.run_name or 'run'}-{now or datetime.now():%Y%m%d-%H%M%S}"
    path = Path(config.output_dir) if config.output_dir else default
    if path.exists() and not path.is_dir():
        raise ValueError(f"output_dir: '{path}' is a file; expected a folder or a new path.")
    folder = RunFolder(path, _checkpoint_to_resume(config, path / "checkpoints"))
    used = [name for name in ("config.yaml", "metrics.jsonl", "checkpoints") if (path / name).exists()]
    if used and config.resume_from_checkpoint is None:
        raise ValueError(
            f"output_dir: '{path}' already holds a run ({', '.join(used)}). To continue it pass "
            "--resume_from_checkpoint latest; to start a new run choose another --output_dir."
        )
    for name in (*FOLDERS, *FILES):
        place = path / name
        if place.exists() and not (place.is_dir() if name in FOLDERS else place.is_file()):
            raise ValueError(
                f"output_dir: '{place}' must be a {'folder' if name in FOLDERS else 'file'} or not be there. Move it "
                "away, or choose another --output_dir."
            )
    return folder


def _checkpoint_to_resume(config: RunConfig, checkpoints: Path) -> Path | None:
    """Return the checkpoint that `latest` or a path means, after reading its facts; None starts afresh.

    A run that `max_steps` ended within a round continues from where that round began, so that it becomes what a longer
    run would have been.
    """
    wanted = config.resume_from_checkpoint
    checkpoint = latest_checkpoint(checkpoints) if wanted == "latest" else wanted and Path(wanted)
    if not checkpoint:
        return None
    facts = read_facts(checkpoint)
    round_start = facts.get("round_start")
    if round_start is None or config.max_steps <= facts["step"]:
        return checkpoint
    if round_start == 0:
        return None
    checkpoint = checkpoint.parent / f"step_{round_start}"
    read_facts(checkpoint)
    return checkpoint
