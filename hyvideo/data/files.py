"""Write files that appear whole or not at all, remove what is in the way, find a path's folder, and claim a folder."""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from hyvideo.config.outside import check_file

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says when there is no room for more: the disk, the user's share of it, or the largest file."""

LOCK = ".lock"
"""File of a claimed folder."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a place to write a file at, which becomes `path` when the block ends well and disappears otherwise.

    A reader of `path` sees the old file or the new one, never a part. Its folder is made; the place has its ending.
    """
    check_output(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp{path.suffix}")
    try:
        with writing(path):
            yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_output(path: Path) -> None:
    """Refuse to put a file where a pipe, socket or device is: for every other program it would be one no longer.

    An OSError, also of a link to one, or to an open file as `/dev/stdout` is.
    """
    with suppress(FileNotFoundError):
        check_file(path)
    if path.is_symlink() and os.readlink(path).startswith("/proc/"):
        raise OSError(errno.EINVAL, "it is a link to an open file of a process, and a file is expected", str(path))


def claim_output(path: Path, inputs: Iterable[str | Path]) -> None:
    """Make a file to write before work begins; a ValueError if it is one of the `inputs`, by this name or another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in inputs:
        with suppress(OSError):  # of what is not there
            if path.samefile(name):
                raise ValueError(f"'{path}' is read by this command, and would be lost: write to another file.")
    path.touch()


def remove(path: Path) -> None:
    """Remove a folder with all in it, or a file, pipe (unopened) or link (not what it leads to), as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


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


def replace_synced(path: Path, content: bytes) -> None:
    """Give a file new content, which the disk has on return, such that a reader sees the old or the new."""
    with replacing(path) as temporary:
        write_synced(temporary, content)


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest of the folders it lies in that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def claim(folder: Path) -> TextIO:
    """Claim `folder` until the returned file is closed or the process has ended; a ValueError if another has it.

    File systems without locks let anyone in.
    """
    file = (folder / LOCK).open("a", encoding="utf-8")  # which empties nothing that a link leads to
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
