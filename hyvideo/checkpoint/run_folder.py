"""The folder of a run: who may write there, and from which checkpoint it continues."""

from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path

from hyvideo.checkpoint.train_state import LATEST, latest_checkpoint, named_checkpoint, read_facts
from hyvideo.config.loading import load_saved_config
from hyvideo.config.schema import RunConfig


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and the checkpoint that it restores first; None starts afresh."""

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

    @property
    def continues_itself(self) -> bool:
        """Whether the checkpoint to restore is one of this folder's own."""
        return self.resume_from is not None and self.resume_from.parent == self.checkpoints

    def require_unchanged(self, config: RunConfig) -> None:
        """Raise a ValueError where another run has written since the folder was opened; called once it is claimed."""
        now = open_run_folder(replace(config, output_dir=str(self.path)))
        if now != self:
            raise ValueError(
                f"output_dir: another run has written to '{self.path}' while this one was starting; it would now "
                f"continue from {now.resume_from}, not from {self.resume_from}. Start again, or choose another folder."
            )

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


def open_run_folder(config: RunConfig) -> RunFolder:
    """Choose the run folder, which the run's first file makes, and find the checkpoint to resume from.

    A ValueError where the folder holds another run, or the checkpoint cannot be read.
    """
    default = Path("outputs") / f"{config.run_name or 'run'}-{datetime.now():%Y%m%d-%H%M%S}"
    path = Path(config.output_dir) if config.output_dir else default
    if path.exists() and not path.is_dir():
        raise ValueError(f"output_dir: '{path}' is a file; expected a folder or a new path.")
    wanted, checkpoints, checkpoint = config.resume_from_checkpoint, path / "checkpoints", None
    if wanted == "latest":
        checkpoint = latest_checkpoint(checkpoints) or _only_checkpoint(checkpoints)
    elif wanted:
        checkpoint = named_checkpoint(wanted)
        for place in (checkpoint.parent.resolve() / checkpoint.name, checkpoint.resolve()):
            if place.parent == checkpoints.resolve():  # one of this folder's own, by whatever path it is named
                checkpoint = checkpoints / place.name
                break
    if checkpoint:
        read_facts(checkpoint)
    folder, metrics = RunFolder(path, checkpoint), path / "metrics.jsonl"
    held = {  # a start that failed before its first update leaves nothing that counts
        "metrics.jsonl": metrics.exists() and not (metrics.is_file() and metrics.stat().st_size == 0),
        "checkpoints": checkpoints.is_dir() and any(checkpoints.iterdir()),
    }
    used = ", ".join(name for name, there in held.items() if there)
    if not used or folder.continues_itself:
        return folder
    began = _began_from(path)
    if wanted is not None and began == (checkpoint and checkpoint.resolve()):
        return folder
    started = f" It continued '{began}', and has no checkpoint of its own yet." if began else ""
    raise ValueError(
        f"output_dir: '{path}' already holds a run ({used}).{started} To continue it pass --resume_from_checkpoint "
        f"{began or 'latest'}; to start from {checkpoint or 'the base model'} choose another --output_dir."
    )


def _began_from(path: Path) -> Path | None:
    """Return the other run's checkpoint that a run continued which was killed before its own first checkpoint."""
    if any((path / "checkpoints").glob("step_*[0-9]")):
        return None
    try:
        began = load_saved_config(path / "config.yaml").run.resume_from_checkpoint
    except ValueError:
        return None
    return None if began in (None, "", "latest") else Path(began).resolve()


def _only_checkpoint(checkpoints: Path) -> Path | None:
    """Return the only checkpoint of a folder without `latest`, which a kill during the first save leaves."""
    found = sorted(checkpoints.glob("step_*[0-9]"), key=lambda path: (len(path.name), path.name))
    if len(found) > 1:
        raise ValueError(
            f"'{checkpoints / LATEST}' is missing, which names the checkpoint to continue from; there are "
            f"{', '.join(path.name for path in found)}. Pass one of them, for example --resume_from_checkpoint "
            f"{found[-1]}, or choose another --output_dir for a new run."
        )
    return found[0] if found else None
