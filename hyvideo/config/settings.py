"""The schema read as data: a `Setting` of each, with its group, type, default and manual."""

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher

from hyvideo.config.schema import Config

_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list of text",
    dict: "a mapping of names to numbers (as text: name=0.5 ..., or JSON)",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting: a flag, a YAML key and an attribute `cfg.<group>.<name>`.

    Attributes:
        kind: bool, int, float, str, list (of text) or dict (of text to numbers, unless nested).
        nested: whether a dict's values may be anything.
        choices: the allowed texts, or words of a list; empty: any.
        optional: whether None is a value.
        doc: its manual, the string literal below it in the schema.
        within: the interval of a number, such as `(0, 1]`; a round bracket leaves its end out. Empty: not a number.
        unit: of a number, where it has one.
        decides: whether it can change the trained weights. A resumed run must have the same value.
        read_when: the value that another setting must have, as `use_lora = true`, or must not have, as
            `sde_window != all`, for anything to read this one. Empty: always.
        frees: the phases whose peak of GPU memory it lowers when it is changed.
    """

    name: str
    group: str
    kind: type
    nested: bool
    choices: tuple[str, ...]
    optional: bool
    default: object
    doc: str
    within: str = ""
    unit: str = ""
    decides: bool = True
    read_when: str = ""
    frees: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """What a value must be, in words, for error messages."""
        words = "a mapping (as text: name=value ..., or JSON)" if self.nested else _EXPECTED[self.kind]
        if self.choices:
            words = f"{'some' if self.kind is list else 'one'} of {', '.join(self.choices)}"
        return f"{words}, or none" if self.optional else words


def _manual_texts(group: type) -> dict[str, str]:
    """Field name -> the string literal that follows the field in the class body, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0].body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _read_schema() -> dict[str, Setting]:
    """All settings in schema order, by name. A hint `X | None` is optional, `Literal` lists choices."""
    defaults = Config()
    settings: dict[str, Setting] = {}
    for group in dataclasses.fields(Config):
        texts = _manual_texts(group.type)
        about = {field.name: field.metadata for field in dataclasses.fields(group.type)}
        for name, hint in typing.get_type_hints(group.type).items():
            optional = isinstance(hint, types.UnionType)
            if optional:
                (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
            origin = typing.get_origin(hint)
            kind = str if origin is typing.Literal else origin or hint
            inner = typing.get_args(hint)[0] if kind is list else hint
            choices = typing.get_args(inner) if typing.get_origin(inner) is typing.Literal else ()
            nested = kind is dict and typing.get_args(hint)[1] is typing.Any
            default, doc = getattr(getattr(defaults, group.name), name), texts.get(name, "")
            settings[name] = Setting(name, group.name, kind, nested, choices, optional, default, doc, **about[name])
    return settings


SETTINGS: dict[str, Setting] = _read_schema()
"""Every setting by its name, in the order of the schema."""

GROUPS: dict[str, str] = {group.name: inspect.cleandoc(group.type.__doc__) for group in dataclasses.fields(Config)}
"""Group name -> what the group is about."""


def parse_size(text: str) -> tuple[int, int]:
    """Read a size such as `352x624`, or `352*624` as the reference takes it too, as (height, width) in pixels."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})[x*]([1-9][0-9]{0,4})", text)
    if match is None:
        raise ValueError(f"a size is HEIGHTxWIDTH in pixels, such as 352x624; received {text!r}")
    return int(match[1]), int(match[2])


def lies_in(value: float, interval: str) -> bool:
    """Whether a number lies in an interval written such as `(0, 1]`; nan lies in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = low < value if interval[0] == "(" else low <= value
    below = value < high if interval[-1] == ")" else value <= high
    return above and below


def value_of(config: Config, name: str) -> object:
    """Return the value that a configuration has for a setting."""
    return getattr(getattr(config, SETTINGS[name].group), name)


def text_of(value: object) -> str:
    """Return a setting's value as one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return " ".join(value) or "empty"
    return "none" if value is None else str(value) or "empty"


def unmet_condition(config: Config, setting: Setting) -> str | None:
    """Return the `read_when` that keeps a setting from being read: its own, or that of the setting it names."""
    if not setting.read_when:
        return None
    name, comparison, wanted = setting.read_when.split()
    if (text_of(value_of(config, name)) == wanted) != (comparison == "="):
        return setting.read_when
    return unmet_condition(config, SETTINGS[name])


def out_of_range(config: Config, *names: str) -> Iterator[str]:
    """Yield a message for each number, of `names` or of all, that lies outside its own interval (`within`)."""
    for name in names or SETTINGS:
        value, interval = value_of(config, name), SETTINGS[name].within
        if interval and value is not None and not lies_in(value, interval):
            yield f"{name} is {value}, but must lie in {interval}"


def settings_of(cfg: Config) -> dict[str, object]:
    """Name -> value of every setting, in plain types."""
    return {name: value for group in dataclasses.asdict(cfg).values() for name, value in group.items()}


def deciding_fields(cfg: Config, dp_size: int = 1) -> dict[str, object]:
    """Name -> value of every field that decides the trained weights: runs that agree in all may continue each other.

    `batch_size` is given for all `dp_size` data-parallel ranks together, so that a run may continue on another number
    of ranks as long as its rollouts have as many videos.
    """
    values = settings_of(cfg)
    values["batch_size"] *= dp_size
    return {name: values[name] for name, setting in SETTINGS.items() if setting.decides}


def nearest(name: str, names: Iterable[str]) -> str:
    """The most similar of `names`, ignoring case, the difference of '-' and '_', and what follows 80 letters."""
    wanted = name[:80].lower().replace("-", "_")
    return max(names, key=lambda candidate: SequenceMatcher(None, wanted, candidate.lower()).ratio())
