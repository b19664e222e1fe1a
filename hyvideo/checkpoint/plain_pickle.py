"""Read a pickle of a checkpoint as plain data: nothing that it names is looked up, made, called or changed.

A pickle is a program for a small stack machine. This machine knows only the operations that checkpoints use. Where a
pickle would make an object, this one notes a `Record`: the name, the arguments and the state. So nothing is executed.
"""

import pickletools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

MAX_OPERATIONS = 2**25
"""Bound on a pickle: an operation costs about 100 bytes and 2 microseconds. A tensor's part takes about 65 of them."""


@dataclass(frozen=True, eq=False, slots=True)
class Name:
    """What a pickle refers to. It is never looked up."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Record:
    """What an object would be made of.

    Attributes:
        kind: name of its class, or of the function that makes it; "" for what the file keeps elsewhere.
        arguments: what that would be called with.
        state: what would then be set; None if nothing.
    """

    kind: str
    arguments: tuple
    state: Any = None


class _RefusedError(ValueError):
    """A pickle does what no checkpoint needs."""


def read_pickle(content: bytes, allowed: Mapping[str, Collection[str]], where: str) -> Any:
    """Return what a pickle says: None, booleans, integers, texts, tuples, lists, dicts, `Name`s and `Record`s.

    Parts may be shared, and lists and dicts may contain themselves: walk only as deep as the expected structure.

    Args:
        content: the pickle.
        allowed: module -> names to which it may refer.
        where: what messages call it.

    Raises:
        ValueError: it is damaged, refers to another name, or uses operations that no checkpoint needs.
    """
    machine = _Machine(allowed)
    try:
        for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if number == MAX_OPERATIONS:
                raise _RefusedError(f"has more than {MAX_OPERATIONS:,} operations")
            if operation.name == "STOP":
                return machine.stack[-1]
            if operation.name not in machine.operations:
                raise _RefusedError(f"uses the operation {operation.name} of pickles")
            machine.operations[operation.name](argument)
    except _RefusedError as error:
        raise ValueError(
            f"{where} {error}, which no checkpoint needs: loading it could run a stranger's code. Do not use this "
            "checkpoint; get it again from whoever made it."
        ) from None
    except (ValueError, LookupError) as error:
        raise ValueError(f"{where} is damaged: {str(error)[:200] or type(error).__name__}.") from error


class _Machine:
    """Stack, marked stacks and memo of a pickle.

    Attributes:
        operations: what it knows, by the names in `pickletools`; each takes the operation's argument. They raise a
            LookupError if a value that they need is not there, and a ValueError if one is of another type.
    """

    def __init__(self, allowed: Mapping[str, Collection[str]]) -> None:
        self._allowed = allowed
        self.stack: list = []
        self._marked: list[list] = []
        self._memo: dict[int, Any] = {}
        self.operations: dict[str, Callable[[Any], object]] = {
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), self._push),
            **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), self._push_number),
            "NONE": lambda _: self._push(None),
            "NEWTRUE": lambda _: self._push(True),
            "NEWFALSE": lambda _: self._push(False),
            "EMPTY_TUPLE": lambda _: self._push(()),
            "EMPTY_LIST": lambda _: self._push([]),
            "EMPTY_DICT": lambda _: self._push({}),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._keep),
            "MEMOIZE": lambda _: self._keep(len(self._memo)),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda number: self._push(self._memo[number])),
            "GLOBAL": lambda words: self._refer(*words.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._refer(*self._pop(2)),
            **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda _: self._record(*self._pop(2))),
            "BINPERSID": lambda _: self._push(Record("", tuple(self._pop(1)))),
            "BUILD": lambda _: self._build(*self._pop(1)),
            "MARK": self._mark,
            "TUPLE1": lambda _: self._push(tuple(self._pop(1))),
            "TUPLE2": lambda _: self._push(tuple(self._pop(2))),
            "TUPLE3": lambda _: self._push(tuple(self._pop(3))),
            "TUPLE": lambda _: self._push(tuple(self._since_mark())),
            "APPEND": lambda _: self._append(self._pop(1)),
            "APPENDS": lambda _: self._append(self._since_mark()),
            "SETITEM": lambda _: self._set(self._pop(2)),
            "SETITEMS": lambda _: self._set(self._since_mark()),
        }

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _push_number(self, number: int) -> None:
        if not -(2**63) <= number < 2**63:
            raise ValueError("a number is too large")
        self.stack.append(number)

    def _pop(self, count: int) -> list:
        """Take the values on top."""
        values = self.stack[-count:]
        if len(values) < count:
            raise LookupError("a value is missing")
        del self.stack[-count:]
        return values

    def _keep(self, number: int) -> None:
        self._memo[number] = self.stack[-1]

    def _refer(self, module: str, name: str) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name is no text")
        if name not in self._allowed.get(module, ()):
            raise _RefusedError(f"refers to {module[:80]}.{name[:80]}")
        self.stack.append(Name(module, name))

    def _record(self, name: Any, arguments: Any) -> None:
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise ValueError("a record is made of something else than a name and arguments")
        self.stack.append(Record(name.name, arguments))

    def _build(self, state: Any) -> None:
        """Give a record its state, once. The state of a class or of a function would change it for everyone."""
        record = self.stack[-1]
        if isinstance(record, Name):
            raise _RefusedError(f"changes {record.module}.{record.name}")
        if not isinstance(record, Record) or record.state is not None:
            raise ValueError("it sets a state twice, or on a value that has none")
        record.state = state

    def _mark(self, _: None) -> None:
        self._marked.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list:
        """Take the values since the last mark."""
        values, self.stack = self.stack, self._marked.pop()
        return values

    def _append(self, values: list) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to what is no list")
        self.stack[-1].extend(values)

    def _set(self, items: list) -> None:
        """Put keys and values into the dict on top. Keys are texts, or records, which differ by identity.

        The hash of a tuple of tuples could take forever, and recurse without end.
        """
        if not isinstance(self.stack[-1], dict) or not all(isinstance(key, str | Record) for key in items[::2]):
            raise ValueError("it sets items of what is no dict, or by a key that is no text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
