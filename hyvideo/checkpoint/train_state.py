"""Save and restore everything that decides a run's future, by all ranks together.

A checkpoint is the folder `step_N`: tensors in safetensors files that any number of ranks reads, numbers and names in
`facts.json`, and what must be there in `manifest.json`. It is written under another name and renamed when complete, and
`latest` is moved last: what `latest` names is whole. `best` names the best one by the judge of a reward guard, which is
kept. All ranks write and read the same folder.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, Field, NonNegativeInt
from pydantic_core import from_json
from torch.distributed.checkpoint.api import CheckpointException

from hyvideo.checkpoint.tensors import TensorPlanner, Tensors, TensorWriter, cause, host_copies
from hyvideo.config.outside import as_value_error, read_file
from hyvideo.data.files import FULL, nearest_existing, remove, replace_synced, write_synced
from hyvideo.distributed.collectives import broadcast_from_main

FACTS = "facts.json"
LATEST = "latest"
BEST = "best"
FORMAT = 4
"""What is written and read; formats 2 and 3 had no safetensors."""

_FOLDER = re.compile(r"step_[0-9]{1,18}")


class _LoraFacts(BaseModel, strict=True, extra="forbid"):
    """Arguments of `lora_config`. The rank is bounded, because a huge one would exhaust the memory."""

    rank: int = Field(ge=1, le=8192)
    alpha: int
    target_modules: list[str]


class _Facts(BaseModel, strict=True, extra="allow"):
    """Types of what `facts.json` may say: it may come from a stranger."""

    step: NonNegativeInt
    round: NonNegativeInt = 0
    settings: dict[str, Any] = {}
    noted: dict[str, str] = {}
    began_at: NonNegativeInt = 0
    lora: _LoraFacts | None = None
    trained: list[str] = []
    sampler: dict[str, NonNegativeInt] = {}
    controller: dict[str, int | float | list[float]] | None = None
    anchor_equals_policy: bool | None = None


class SaveError(RuntimeError):
    """A checkpoint could not be written; those written before are as they were."""


@dataclass(frozen=True)
class PendingSave:
    """A checkpoint that is being written to `partial`, and is not valid before `finish` has put it at `target`.

    Attributes:
        written: done when all ranks' tensors and the manifest are on disk, or one could not write; None: they are.
        keep_last, keep_every: checkpoints to keep, see `begin_save`.
    """

    target: Path
    partial: Path
    written: Future | None
    keep_last: int | None
    keep_every: int

    def finish(self) -> Path:
        """Wait for the tensors, put the checkpoint in its place, point `latest` at it, then drop old ones.

        All ranks raise a SaveError if one could not write.
        """
        with _explained(self.target, self.partial):
            if self.written:
                self.written.result()
            broadcast_from_main(self._publish)
        return self.target

    def _publish(self) -> None:
        replaced = self.target.with_name(f"{self.target.name}.replaced")  # until this one is in its place
        if os.path.lexists(self.target):  # a step that is made again after a resume
            os.replace(self.target, replaced)
        os.replace(self.partial, self.target)
        remove(replaced)
        point(LATEST, self.target)
        if self.keep_last is None:
            return
        # Checkpoints of later steps, which a resume has abandoned, must not evict the one that it went back to.
        past = [old for old in checkpoints_of(self.target.parent) if _step_of(old) <= _step_of(self.target)]
        every, before = self.keep_every, [0, *map(_step_of, past)]  # the first one at or after each multiple stays
        best = _name_in(self.target.parent / BEST)  # whose checkpoint may have been deleted by hand
        for step, old in zip(before, past[: -self.keep_last], strict=False):
            if old.name != best and (not every or step // every == _step_of(old) // every):
                removal = _WRITER.submit(_drop, old)
                if self.written is None:  # else training need not wait: 100 GB take many seconds
                    removal.result()


def _drop(checkpoint: Path) -> None:
    """Remove a checkpoint, which from the first moment on is none; what is being read goes with the next save."""
    leaving = checkpoint.with_name(f"{checkpoint.name}.partial")
    with suppress(OSError):
        os.replace(checkpoint, leaving)
    remove(leaving)


def begin_save(
    folder: Path,
    step: int,
    tensors: Tensors,
    facts: Mapping[str, Any],
    *,
    keep_last: int | None = None,
    keep_every: int = 0,
    write_more: Callable[[Path], None] = lambda folder: None,
    beside_training: bool = False,
    collective_timeout: int | None = None,
) -> PendingSave:
    """Begin to write checkpoint `folder/step_{step}`; `finish` of the returned save completes it. All ranks call both.

    A save must be finished before the next one begins. All ranks raise a SaveError if one could not write; earlier
    checkpoints are intact.

    Args:
        folder: the run's `checkpoints` folder, made when missing.
        step: number of updates made.
        tensors: groups of named tensors (policy, optimizer, ...), sharded or whole.
        facts: everything else, as JSON.
        keep_last: how many checkpoints to keep, this one included; None keeps all.
        keep_every: also keep the first at or after each multiple of this many steps; 0: none.
        write_more: called on the main rank with the unfinished folder to add files for other programs.
        beside_training: return when the tensors are copied to host memory; a thread writes them.
        collective_timeout: seconds that this thread waits for those of other ranks; None: as long as gloo does.
    """
    target, partial = folder / f"step_{step}", folder / f"step_{step}.partial"

    def start() -> None:
        """Make the folder and write all but the tensors."""
        _WRITER.submit(int).result()  # what is still being removed takes space
        complete_replacements(folder)
        for left in folder.glob("step_*[0-9].partial"):  # of earlier attempts, at this step or others
            remove(left)
        partial.mkdir(parents=True)
        needed = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())  # a replicated one once
        free = shutil.disk_usage(partial).free
        if needed > free:
            raise OSError(f"it needs {needed / 1e9:.3g} GB, so nothing was written")
        write_more(partial)
        write_synced(partial / FACTS, json.dumps({"format": FORMAT, "step": step, **facts}, indent=1).encode())

    with _explained(target, partial):
        broadcast_from_main(start)
        alone = not dist.is_initialized()
        group = _group_of_writers(collective_timeout) if beside_training and not alone else None
        how = {"storage_writer": TensorWriter(partial), "planner": TensorPlanner(tensors), "process_group": group}
        written = None
        if beside_training:
            written = _WRITER.submit(dcp.save, host_copies(tensors), no_dist=alone, **how)
        else:
            dcp.save(tensors, no_dist=alone, **how)
    return PendingSave(target, partial, written, keep_last, keep_every)


_WRITER = ThreadPoolExecutor(1, "checkpoint")
"""Writes checkpoints beside training and removes old ones, one after the other."""


@cache
def _group_of_writers(collective_timeout: int | None) -> dist.ProcessGroup:
    """Return a process group of its own for the writing threads: their messages must not mix with the training's."""
    return dist.new_group(backend="gloo", timeout=collective_timeout and timedelta(seconds=collective_timeout))


def point(name: str, checkpoint: Path) -> None:
    """Make a finished checkpoint the one that `latest` or `best` stands for."""
    replace_synced(checkpoint.parent / name, checkpoint.name.encode())


def named_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint that `RUN/checkpoints/best` or `latest` stands for; any other path as it is."""
    path = Path(path)
    name = _name_in(path) if path.name in (BEST, LATEST) else None
    if name is not None and not _is_finished(path.parent, name):
        found = [each.name for each in checkpoints_of(path.parent)]
        raise ValueError(
            f"'{path}' names {name!r}, which is not a finished checkpoint beside it; found {found or 'none'}. Pass one "
            "of these by its path."
        )
    return path if name is None else path.parent / name


def _name_in(path: Path) -> str | None:
    """Return what a file such as `latest` says, at most 80 bytes of it; None if there is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(80).decode(errors="replace").strip()


def _is_finished(folder: Path, name: str) -> bool:
    return bool(_FOLDER.fullmatch(name)) and (folder / name / FACTS).is_file()


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the finished checkpoints in `folder`, oldest step first."""
    return sorted((path for path in folder.glob("step_*") if _is_finished(folder, path.name)), key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def complete_replacements(folder: Path) -> None:
    """Undo or complete what a process that was killed between two renames left behind."""
    for replaced in folder.glob("step_*[0-9].replaced"):
        target = replaced.with_suffix("")
        if target.exists() or not replaced.is_dir():
            remove(replaced)
        else:
            remove(target)  # at most a link to nothing
            os.replace(replaced, target)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `folder/latest` names, or None when there is none yet."""
    complete_replacements(folder)
    return named_checkpoint(folder / LATEST) if os.path.lexists(folder / LATEST) else None


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """Return the facts of `checkpoint`; a ValueError if they cannot be read or one is not of its type."""
    try:
        facts = from_json(read_file(checkpoint / FACTS))
    except (OSError, ValueError) as error:
        if any((checkpoint / place / ".metadata").exists() for place in (".", "transformer")):
            raise ValueError(
                f"'{checkpoint}' is a checkpoint of the original training script, a pickle. Convert it once: python -m "
                f"scripts.convert_release_checkpoint {checkpoint} (see its --help)."
            ) from error
        raise ValueError(
            f"'{checkpoint}' is not a readable checkpoint ({error}). Expected a folder step_N of a run's checkpoints "
            f"folder, with {FACTS} in it."
        ) from error
    received = facts.get("format") if isinstance(facts, dict) else None
    if received != FORMAT:
        raise ValueError(f"'{checkpoint}' has checkpoint format {received}; this version reads format {FORMAT}.")
    with as_value_error(f"'{checkpoint}' has a damaged {FACTS}", ValueError):
        return _Facts.model_validate(facts).model_dump(exclude_unset=True)


@contextmanager
def _explained(target: Path, partial: Path) -> Iterator[None]:
    """Turn what went wrong while saving into a message, and free the space of the unfinished folder."""
    try:
        yield
    except (CheckpointException, OSError, ValueError) as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            remove(partial)
        on = "continue with --resume_from_checkpoint latest."
        there = checkpoints_of(target.parent)
        intact = "Earlier checkpoints are intact." if there else "No finished checkpoint is in that folder."
        if "KeyboardInterrupt" in str(error):  # which the library turns into its own error
            raise SaveError(f"Cannot save '{target}': it was interrupted. {intact} To go on {on}") from error
        free = shutil.disk_usage(nearest_existing(target)).free
        space = ("GB, so nothing was written", *map(os.strerror, FULL))
        full = any(words in str(error) for words in space)
        advice = f"Make space or choose another output_dir, then {on}" if full else f"Once the cause is gone, {on}"
        raise SaveError(
            f"Cannot save '{target}': {cause(error)}. {free / 1e9:.1f} GB are free there. {intact} {advice}"
        ) from error
