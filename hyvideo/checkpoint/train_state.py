"""Save and restore everything that decides a run's future.

A checkpoint is the folder `step_N`: tensors in PyTorch's distributed format, numbers and names in `facts.json`.
It is written beside its place and renamed when complete, and `latest` is moved last: what `latest` names is whole.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

FACTS = "facts.json"
LATEST = "latest"
FORMAT = 1

Tensors = dict[str, dict[str, Tensor]]


def save_train_state(
    folder: Path,
    step: int,
    tensors: Tensors,
    facts: Mapping[str, Any],
    *,
    keep_last: int | None = None,
    write_more: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write checkpoint `folder/step_{step}`, point `latest` at it, then drop old ones.

    Args:
        folder: the run's `checkpoints` folder, made when missing.
        step: number of updates made.
        tensors: groups of named tensors (policy, optimizer, ...).
        facts: everything else, as JSON.
        keep_last: how many checkpoints to keep, this one included; None keeps all.
        write_more: called with the unfinished folder to add files for other programs.

    Returns:
        The finished checkpoint's folder.
    """
    target, partial = folder / f"step_{step}", folder / f"step_{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt
    partial.mkdir(parents=True)
    with one_process():
        dcp.save(tensors, checkpoint_id=partial, no_dist=True)
    write_more(partial)
    _write_synced(partial / FACTS, json.dumps({"format": FORMAT, "step": step, **facts}, indent=1))
    shutil.rmtree(target, ignore_errors=True)  # of a step that is made again after a resume
    os.replace(partial, target)
    _write_synced(folder / f"{LATEST}.partial", target.name)
    os.replace(folder / f"{LATEST}.partial", folder / LATEST)
    if keep_last is not None:
        for old in checkpoints_of(folder)[:-keep_last]:
            if old != target:
                shutil.rmtree(old)
    return target


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the finished checkpoints in `folder`, oldest step first."""
    found = [path for path in folder.glob("step_*") if path.suffix == "" and (path / FACTS).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `folder/latest` names, or None when there is none yet.

    Raises:
        ValueError: `latest` names a checkpoint that is not there; the finished ones are listed.
    """
    if not (folder / LATEST).is_file():
        return None
    name = (folder / LATEST).read_text().strip()
    if not (folder / name / FACTS).is_file():
        found = [path.name for path in checkpoints_of(folder)]
        raise ValueError(
            f"'{folder / LATEST}' names '{name}', which is no finished checkpoint; found {found or 'none'}. "
            "Pass one of these with --resume_from_checkpoint PATH."
        )
    return folder / name


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """Return the facts of `checkpoint`.

    Raises:
        ValueError: no checkpoint there, not readable, or of a newer format.
    """
    try:
        facts = json.loads((checkpoint / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'{checkpoint}' is not a readable checkpoint ({error}). Expected a folder step_N of a run's checkpoints "
            f"folder, with {FACTS} in it."
        ) from error
    received = facts.get("format") if isinstance(facts, dict) else None
    if received != FORMAT:
        raise ValueError(f"'{checkpoint}' has checkpoint format {received}; this version reads format {FORMAT}.")
    return facts


def load_tensors(checkpoint: Path, tensors: Tensors) -> None:
    """Fill `tensors` in place from `checkpoint`.

    Args:
        checkpoint: a finished checkpoint's folder.
        tensors: groups of named tensors of the right shapes; every one must be in the checkpoint.

    Raises:
        ValueError: a file is damaged, or a tensor is missing or of another shape.
    """
    try:
        with one_process():
            dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ValueError(
            f"Cannot restore '{checkpoint}': {cause}. The checkpoint is damaged, or the "
            "run's model settings (pretrained_model_root, LoRA, optimizer) differ from those it was made with."
        ) from error


@contextmanager
def one_process() -> Iterator[None]:
    """Silence the library's warning that there is one process only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _write_synced(path: Path, text: str) -> None:
    """Write `text` and wait until the disk has it."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
