"""Write files that appear whole or not at all, find the folder that a new path will lie in, and claim a folder."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says when there is no room for more: the disk, the user's share of it, or the largest file."""

LOCK = ".lock"
"""File of a claimed folder."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a place to write a file at, which becomes `path` when the block ends well and disappears otherwise.

    A reader of `path` sees the old file or the new one, never a part. Its folder is made; the place has its ending.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        with writing(path):
            yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in an error of the system: a write that fails does not say where."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with writing(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest of the folders it lies in that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def claim(folder: Path) -> TextIO:
    """Claim `folder` until the returned file is closed or the process has ended; a ValueError if another has it.

    File systems without locks let anyone in.
    """
    file = (folder / LOCK).open("w", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise ValueError(
            f"output_dir: another process is training in '{folder}'; choose another folder, or end it first. If its "
            f"machine is gone for good, delete '{folder / LOCK}'."
        ) from None
    except OSError:
        pass
    return file
