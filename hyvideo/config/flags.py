"""The command line, made from the schema: one flag per knob, and the manual that `--help` prints."""

import argparse
from functools import partial
from typing import NoReturn

from hyvideo.config.knobs import GROUPS, KNOBS, Knob, text_of
from hyvideo.config.outside import printable
from hyvideo.config.reference_flags import add_flags_without_effect, names_of

METAVARS = {bool: "BOOL", int: "INT", float: "NUMBER", str: "TEXT", list: "TEXT", dict: "JSON"}
"""Type of a knob -> the placeholder of its value in `--help`."""

_ABOUT = (
    "Every flag is also a key of the YAML files, by itself or under its group. Values come from the schema's defaults, "
    "then the files of --config from left to right, then the flags. Booleans take true/false, yes/no or 1/0, and a "
    "bare flag means true. A value that begins with '-' is written --flag=value; 'none' clears what may be none."
)


class Parser(argparse.ArgumentParser):
    """A parser that shows a received value's control characters instead of sending them to the terminal."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with 2."""
        super().error(printable(message))


class TeachingParser(argparse.ArgumentParser):
    """A parser whose errors are ValueErrors instead of an exit."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong, with advice."""
        raise ValueError(f"{message} (a value that begins with '-' is written --flag=value; --help lists all flags)")


def range_text(knob: Knob) -> str:
    """Return what a number must be, such as `> 0, seconds`; empty for settings that are none."""
    within, unit = knob.facts.within, knob.facts.unit
    if within.endswith("inf)"):
        within = f"{'>' if within[0] == '(' else '>='} {within[1:].partition(',')[0]}"
    elif within:
        within = f"in {within}"
    return f"{within}, {unit}" if unit else within


def _add_flag(group: argparse._ArgumentGroup, knob: Knob) -> None:
    """Add a knob's flag; its value stays raw text (a list of it for list knobs) and is absent when not given."""
    metavar = "{" + ",".join(knob.choices) + "}" if knob.choices else METAVARS[knob.kind]
    arity = {bool: {"nargs": "?", "const": "true"}, list: {"nargs": "+"}}.get(knob.kind, {})
    facts = "; ".join(filter(None, [range_text(knob), f"default: {text_of(knob.default)}"]))
    text = f"{knob.doc} [{facts}]".replace("%", "%%")
    group.add_argument(
        *names_of(knob.name), dest=knob.name, metavar=metavar, default=argparse.SUPPRESS, help=text, **arity
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser of `--config` and all knobs, grouped as the schema is.

    Its errors are ValueErrors; `-h` and `--help` print the manual and exit with 0.
    """
    parser = TeachingParser(
        prog="post_train.py",
        usage="%(prog)s [--config FILE [FILE ...]] [--flag VALUE] ...",
        description=_ABOUT,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=8),  # each flag on a line of its own
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="YAML files, merged from left to right; each says only what differs.",
    )
    for name, about in GROUPS.items():
        group = parser.add_argument_group(name, about)
        for knob in KNOBS.values():
            if knob.group == name:
                _add_flag(group, knob)
    add_flags_without_effect(parser)
    return parser
