"""Save and restore everything that decides a run's future, by all ranks together.

A checkpoint is the folder `step_N`: tensors in PyTorch's distributed format (any number of ranks reads it) with their
places in `index.json`, numbers and names in `facts.json`, sizes and hashes of all files in `manifest.json`. It is
written under another name and renamed when complete, and `latest` is moved last: what `latest` names is whole. `best`
names the best one by the judge of a reward guard, which is kept. All ranks write and read the same folder.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from pydantic_core import from_json
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from hyvideo.checkpoint.manifest import hash_files, write_manifest
from hyvideo.checkpoint.tensor_reader import TensorReader, TensorWriter
from hyvideo.config.outside import read_file
from hyvideo.data.files import FULL, nearest_existing, remove, replace_synced, write_synced
from hyvideo.distributed.collectives import broadcast_from_main

FACTS = "facts.json"
LATEST = "latest"
BEST = "best"
FORMAT, READABLE = 3, (2, 3)
"""What is written, and what is read; format 2 has a pickle in the place of `index.json`."""

_FOLDER = re.compile(r"step_[0-9]{1,18}")

Tensors = dict[str, dict[str, Tensor]]


class _LoraFacts(BaseModel):
    """Arguments of `lora_config`. The rank is bounded, because a huge one would exhaust the memory.

    Checkpoints of earlier versions also hold the dropout. It must be 0, because the replay must repeat the rollout.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    rank: int = Field(ge=1, le=8192)
    alpha: int
    dropout: float = Field(default=0.0, ge=0, le=0, exclude=True)
    target_modules: list[str]


class _Facts(BaseModel):
    """Types of what `facts.json` may say: it may come from a stranger."""

    model_config = ConfigDict(strict=True, extra="allow")
    step: NonNegativeInt
    round: NonNegativeInt = 0
    settings: dict[str, Any] = {}
    noted: dict[str, str] = {}
    began_at: NonNegativeInt = 0
    lora: _LoraFacts | None = None
    trained: list[str] = []
    sampler: dict[str, int] = {}
    controller: dict[str, int | float | list[float]] | None = None
    anchor_equals_policy: bool | None = None


class SaveError(RuntimeError):
    """A checkpoint could not be written; those written before are as they were."""


@dataclass(frozen=True)
class PendingSave:
    """A checkpoint that is being written to `partial`, and is not valid before `finish` has put it at `target`.

    Attributes:
        written: done when all ranks' tensors are on disk; None when they are already.
        keep_last, keep_every: checkpoints to keep, see `begin_save`.
    """

    target: Path
    partial: Path
    written: Future | None
    keep_last: int | None
    keep_every: int

    def finish(self) -> Path:
        """Wait for the tensors, put the checkpoint in its place, point `latest` at it, then drop old ones.

        Raises:
            SaveError: it could not be written, on any rank; all raise it.
        """
        with _explained(self.target, self.partial), one_process():
            if self.written is not None:
                self.written.result()
            hashes = hash_files(self.partial)
            broadcast_from_main(lambda: self._publish(hashes))
        return self.target

    def _publish(self, hashes: dict) -> None:
        write_manifest(self.partial, hashes)
        replaced = self.target.with_name(f"{self.target.name}.replaced")  # until this one is in its place
        if os.path.lexists(self.target):  # a step that is made again after a resume
            os.replace(self.target, replaced)
        os.replace(self.partial, self.target)
        remove(replaced)
        point_latest_at(self.target)
        if self.keep_last is not None:
            for old in self._superseded():
                remove(old)  # one that is being read goes with the next save

    def _superseded(self) -> list[Path]:
        """Return the checkpoints that this one supersedes.

        Checkpoints of later steps, which a resume has abandoned, must not evict the one that it went back to.
        """
        past = [old for old in checkpoints_of(self.target.parent) if _step_of(old) <= _step_of(self.target)]
        every, before = self.keep_every, [0, *map(_step_of, past)]  # the first one at or after each multiple stays
        best = _name_in(self.target.parent / BEST)  # whose checkpoint may have been deleted by hand
        return [
            old
            for step, old in zip(before, past[: -self.keep_last], strict=False)
            if old.name != best and (not every or step // every == _step_of(old) // every)
        ]


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

    Raises:
        SaveError: it could not be written, on any rank; earlier checkpoints are intact.
    """
    target, partial = folder / f"step_{step}", folder / f"step_{step}.partial"

    def start() -> None:
        """Make the folder and write all but the tensors."""
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

    written = None
    with _explained(target, partial), one_process():
        broadcast_from_main(start)
        alone = not dist.is_initialized()
        if beside_training:
            group = None if alone else _group_of_writers(collective_timeout)
            stager = DefaultStager(StagingOptions(False, False, False, False))  # a plain copy, made at once
            # What the thread writes is on the CPU: it must not wait for a GPU's stream, as the default writer does.
            writer = TensorWriter(partial, per_thread_copy_ahead=0)
            written = dcp.async_save(
                tensors, storage_writer=writer, async_stager=stager, process_group=group, no_dist=alone
            )
            written.add_done_callback(lambda _: stager.close())
        else:
            dcp.save(tensors, storage_writer=TensorWriter(partial), no_dist=alone)
    return PendingSave(target, partial, written, keep_last, keep_every)


@cache
def _group_of_writers(collective_timeout: int | None) -> dist.ProcessGroup:
    """Return a process group of its own for the writing threads: their messages must not mix with the training's."""
    return dist.new_group(backend="gloo", timeout=collective_timeout and timedelta(seconds=collective_timeout))


def point_latest_at(checkpoint: Path, name: str = LATEST) -> None:
    """Make a finished checkpoint the one that a resume from `latest` takes, or the one that another name stands for."""
    replace_synced(checkpoint.parent / name, checkpoint.name.encode())


def named_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint that `RUN/checkpoints/best` or `latest` stands for; any other path as it is.

    Raises:
        ValueError: the file names no finished checkpoint beside it.
        OSError: it cannot be read, or the path is too long.
    """
    path = Path(path)
    name = _name_in(path) if path.name in (BEST, LATEST) else None
    if name is None:
        return path
    if not _is_finished(path.parent, name):
        raise ValueError(f"'{path}' names {name!r}, which is not a finished checkpoint beside it.")
    return path.parent / name


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
    """Return the checkpoint that `folder/latest` names, or None when there is none yet.

    Raises:
        ValueError: `latest` is not a file, or names a checkpoint that is not there; the finished ones are listed.
    """
    complete_replacements(folder)
    latest = folder / LATEST
    if not os.path.lexists(latest):
        return None
    name = _name_in(latest)
    if name is None or not _is_finished(folder, name):
        said = "is not a file" if name is None else f"names {name!r}, which is not a finished checkpoint"
        found = [path.name for path in checkpoints_of(folder)]
        raise ValueError(
            f"'{latest}' {said}; found {found or 'none'}. Pass one of these with --resume_from_checkpoint PATH."
        )
    return folder / name


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """Return the facts of `checkpoint`.

    Raises:
        ValueError: no checkpoint there, not readable, of a newer format, or a fact is not of its type.
    """
    try:
        facts = from_json(read_file(checkpoint / FACTS))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'{checkpoint}' is not a readable checkpoint ({error}). Expected a folder step_N of a run's checkpoints "
            f"folder, with {FACTS} in it."
        ) from error
    received = facts.get("format") if isinstance(facts, dict) else None
    if received not in READABLE:
        raise ValueError(f"'{checkpoint}' has checkpoint format {received}; this version reads formats {READABLE}.")
    try:
        return _Facts.model_validate(facts).model_dump(exclude_unset=True)
    except ValueError as error:
        raise ValueError(f"'{checkpoint}' has a damaged {FACTS}: {error}") from error


def load_tensors(
    checkpoint: Path, tensors: Tensors, *, alone: bool = False, reader: TensorReader | None = None
) -> None:
    """Fill `tensors` in place from `checkpoint`; all ranks call it, each with its shards.

    Args:
        checkpoint: a finished checkpoint's folder.
        tensors: groups of named tensors of the right shapes; every one must be in the checkpoint.
        alone: the tensors are whole, and other ranks need not call.
        reader: the reader whose index gave the shapes of `tensors`; None if they are a run's own.

    Raises:
        ValueError: a file is damaged, or a tensor is missing or of another shape.
    """
    try:
        used = reader or TensorReader(checkpoint)
        if alone:
            used.read_metadata()  # of what it refuses within the call below the library would print a traceback
        with one_process():
            dcp.load(tensors, storage_reader=used, no_dist=alone or not dist.is_initialized())
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        differing = "the run's model settings (pretrained_model_root, LoRA, optimizer) differ from the checkpoint's"
        reasons = "damaged" if reader else f"damaged, or {differing}"
        raise ValueError(f"Cannot restore '{checkpoint}': {_cause(error)}. The checkpoint is {reasons}.") from error


def tensor_names(checkpoint: Path) -> set[str]:
    """Return what the tensors of a checkpoint are called: `group.name`."""
    return set(TensorReader(checkpoint).read_metadata().state_dict_metadata)


def require_dtypes(checkpoint: Path, tensors: Tensors) -> None:
    """Refuse to restore weights of one precision into another.

    Raises:
        ValueError: a tensor of `tensors` has another dtype in `checkpoint`.
    """
    stored = TensorReader(checkpoint).read_metadata().state_dict_metadata
    for group, named in tensors.items():
        for name, tensor in named.items():
            properties = getattr(stored.get(f"{group}.{name}"), "properties", None)
            if properties is not None and properties.dtype != tensor.dtype:
                raise ValueError(
                    f"'{checkpoint}' has {group} {name} in {properties.dtype}, this run in {tensor.dtype}: resume with "
                    "the master_weight_type of the run that saved it, on the same kind of device."
                )


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
        space = ("GB, so nothing was written", "inline_container", *map(os.strerror, FULL))
        full = any(words in str(error) for words in space)
        advice = f"Make space or choose another output_dir, then {on}" if full else f"Once the cause is gone, {on}"
        raise SaveError(
            f"Cannot save '{target}': {_cause(error)}. {free / 1e9:.1f} GB are free there. {intact} {advice}"
        ) from error


def _cause(error: BaseException) -> str:
    """Return the last line of what an error says, which names its root."""
    line = (str(error).strip() or type(error).__name__).splitlines()[-1]
    if "inline_container" in line:  # all that is left of what the system said to the library's writer
        return "a file could not be written to its end; is the disk full or a quota reached?"
    return line.rstrip(".")  # the message around it ends the sentence


@contextmanager
def one_process() -> Iterator[None]:
    """Silence the library's warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
