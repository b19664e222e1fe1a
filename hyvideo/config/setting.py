"""What is known about a setting besides its name, type, default and manual text: it stands in the field itself."""

from copy import copy
from dataclasses import dataclass, field
from typing import Any

EVERY_PHASE = ("rollout", "reward", "anchor", "update", "validation")
"""The parts of a run that have a memory peak of their own."""


@dataclass(frozen=True)
class Facts:
    """Everything that other files read from a setting's row.

    Attributes:
        within: the interval of a number, such as `(0, 1]`; a round bracket leaves its end out. Empty: not a number.
        unit: of a number, where it has one.
        decides: whether it can change the trained weights. A resumed run must have the same value.
        read_when: the value that another setting must have, as `use_lora = true`, or must not have, as
            `sde_window != all`, for anything to read this one. Empty: always.
        frees: the phases whose peak of GPU memory it lowers when it is changed.
    """

    within: str = ""
    unit: str = ""
    decides: bool = True
    read_when: str = ""
    frees: tuple[str, ...] = ()


def setting(default: Any, **facts: Any) -> Any:
    """Return a dataclass field with a default, which may be a list or dict, and with `Facts`."""
    metadata = {"facts": Facts(**facts)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def lies_in(value: float, interval: str) -> bool:
    """Whether a number lies in an interval written such as `(0, 1]`; nan lies in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = low < value if interval[0] == "(" else low <= value
    below = value < high if interval[-1] == ")" else value <= high
    return above and below
