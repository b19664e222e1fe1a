"""Files that appear whole or not at all, the folder in which those of a path to come will be, and whose it is."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

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
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path, most: int = 2**27) -> bytes:
    """Return the content of a file of at most so many bytes; a tokenizer's has up to 2**25.

    Raises:
        OSError: it is missing, or a pipe or device, or a link to one, whose content might never end, or larger.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.name}")
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"{path.name} has more than {most:,} bytes")
    return content


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest of the folders it lies in that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def claim(folder: Path) -> TextIO:
    """Claim `folder` for this process until the returned file is closed or the process has ended.

    File systems without locks let anyone in.

    Raises:
        ValueError: another process has claimed it.
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
