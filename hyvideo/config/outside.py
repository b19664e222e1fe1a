"""What comes from outside: files that might never end, text that a terminal would obey, and the user's own classes."""

import atexit
import errno
import gc
import importlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import ValidationError

T = TypeVar("T")


def check_file(path: str | Path) -> None:
    """Refuse, by an OSError, what cannot be read to its end: a pipe, socket or device, or a link to one."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder says so by itself
        raise OSError(errno.EINVAL, "it is a pipe, socket or device, and a file is expected", str(path))


def read_file(path: str | Path, most: int | None = 2**27) -> bytes:
    """Return the content of a file of at most `most` bytes, or of any size; an OSError where that cannot be read."""
    check_file(path)
    with open(path, "rb") as file:
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


@contextmanager
def as_value_error(what: str, *kinds: type[Exception], advice: str = "") -> Iterator[None]:
    """Raise an error of these kinds as a ValueError: what could not be done, why, and what to do about it."""
    try:
        yield
    except kinds as error:
        named = isinstance(error, OSError) and error.filename and str(error.filename) in what
        reason = error.strerror if named else in_words(error)
        raise ValueError(f"{what}: {reason.rstrip('.')}. {advice}" if advice else f"{what}: {reason}") from error


def check_files(folder: str | Path) -> None:
    """Raise a ValueError for a folder with a pipe, socket or device, or a link to one: a library would wait for it."""
    for path in Path(folder).rglob("*"):
        with as_value_error(f"'{path}' cannot be used", OSError), suppress(FileNotFoundError):
            check_file(path)  # a link to nothing is none that anybody needs


def with_home(value: Any) -> Any:
    """Put the home folder in the place of a leading `~`, also after `NAME=`, in a text or in those that it holds."""
    if isinstance(value, Mapping):
        return {key: with_home(one) for key, one in value.items()}
    if isinstance(value, list):
        return [with_home(one) for one in value]
    names, path = re.fullmatch(r"((?:[\w.:-]+=)*)(.*)", value if isinstance(value, str) else "", re.DOTALL).groups()
    return names + os.path.expanduser(path) if path.startswith("~") else value


def printable(text: object) -> str:
    """Return a text as `repr` shows it, but for line ends and tabs: one from a file could rename the window."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in str(text))


def in_words(error: BaseException) -> str:
    """Return what an error says; of the system's the file and the reason, of pydantic's its first faults and places."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False)[:5]
        return "; ".join(f"{'.'.join(map(str, fault['loc'])):.200}: {fault['msg']}".lstrip(": ") for fault in faults)
    named = isinstance(error, OSError) and error.filename is not None and error.strerror
    return f"'{error.filename}': {error.strerror}" if named else str(error)


def complain(message: str, *, once: bool = False) -> None:
    """Print a message that may quote a file to stderr; `once` where all ranks have the same to say: the first does."""
    if not once or os.environ.get("RANK", "0") == "0":
        print(printable(message), file=sys.stderr, flush=True)


@contextmanager
def loading(program: str) -> Iterator[None]:
    """Import what takes seconds: a terminal is told. To look through it for garbage would take a third of a start."""
    if sys.stderr.isatty():
        complain(f"{program}: loading PyTorch and what depends on it ...", once=True)
    atexit.register(gc.freeze)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_class(setting: str, path: str, base: type[T]) -> type[T]:
    """Import the subclass of `base` that `setting` names as `module:Class`; a ValueError if it is something else."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, SystemExit) as error:
        raise ValueError(
            f"{setting}: '{path}' cannot be imported ({type(error).__name__}: {error}). Expected module:Class, with "
            "the module's folder on PYTHONPATH."
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{setting}: '{path}' must be a subclass of {base.__module__}.{base.__name__}.")
    return found
