"""Command-line flags from the fields of dataclasses, which define a setting's name, type, default and help once.

A field has its help in `field(default=..., metadata={"help": "..."})`; `choices` and `metavar` are further keys.
"""

import argparse
import difflib
import math
import re
import shutil
import textwrap
import types
from collections.abc import Collection
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TypeVar, get_args, get_origin

from specdec.cli.limits import LIMITS
from specdec.schema import check_value

Settings = TypeVar("Settings")
FREE_TEXT = ("prompt", "stop")  # flags that check themselves what a text may be


def help_width() -> int:
    """Columns of a help text: the terminal's, at most 100."""
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def reflow(text: str, width: int) -> str:
    """A docstring in lines of at most `width` columns. Lines that are indented, such as examples, stay as they are."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else textwrap.fill(p, width) for p in paragraphs)


class HelpFormatter(argparse.HelpFormatter):
    """Flags and their help side by side, and descriptions with their paragraphs and examples."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=help_width())
        self._action_max_length = 12  # argparse leaves no room for the names of sub-commands

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return reflow(text, width)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kinds = {None: "NAME", str: "NAME", int: "N", float: "X", Path: "FILE", whole_numbers: "N,N,..."}
        return kinds.get(action.type) or super()._get_default_metavar_for_optional(action)


class Parser(argparse.ArgumentParser):
    """argparse's, which also refuses an empty text, as of a shell variable that is not set, a number that is none, and
    one outside of `Limits`."""

    def parse_args(self, args=None, namespace=None):
        given, rest = self.parse_known_args(args, namespace)
        if rest:
            raise ValueError(self._asked(given)._nobodys(rest[0]))
        return given

    def _asked(self, given: argparse.Namespace) -> "Parser":
        """Return the parser of the sub-command that was given, or this one without sub-commands."""
        groups = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return next((group.choices[getattr(given, group.dest)] for group in groups), self)

    def _nobodys(self, word: str) -> str:
        """Return the error for a word that belongs to no flag."""
        if word.startswith("-"):
            flag = word.partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, 2)
            return f"there is no flag {flag}; " + (
                f"there is {' and '.join(near)}" if near else f"{self.prog} --help lists all"
            )
        return f"{word} belongs to no flag: a text with spaces needs quotes around it, ' or \""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]):
        if action.option_strings and arg_strings == ["--"]:  # argparse would take it for no value at all
            raise ValueError(f"{action.option_strings[-1]} takes a value, and '--' is none")
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str):
        flag = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
        if not arg_string.strip() and action.dest not in FREE_TEXT:
            raise ValueError(
                f"{flag} is empty: is a variable of the shell not set? Leave the flag out, or give a value"
            )
        value = super()._get_value(action, arg_string)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{flag} must be a finite number, got {number}")
            if isinstance(number, int | float) and action.dest in LIMITS:
                check_value(LIMITS[action.dest], number, flag)
        return value


def command_parser(name: str, description: str, usage: str = "[options]") -> argparse.ArgumentParser:
    """The parser of `specdec NAME`. description: a module's docstring will do. usage: what follows the name."""
    prog = f"specdec {name}"
    parser = Parser(
        prog=prog,
        usage=f"{prog} {usage}",
        description=description,
        formatter_class=HelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)  # a group of its own takes three lines
    return parser


def kind_of(setting: Field) -> type:
    """The type of a field's values, None left out: `int | None` is int."""
    if get_origin(setting.type) is types.UnionType:
        return next(kind for kind in get_args(setting.type) if kind is not types.NoneType)
    return setting.type


def add_flags(
    group: argparse._ActionsContainer, settings: type, *names: str, required: Collection[str] = (), **defaults
) -> None:
    """A flag for each field of the dataclass `settings`, or for those in `names`, in their order.

    `defaults` take the place of the fields' own."""
    known = {f.name: f for f in fields(settings)}
    for name in names or known:
        setting, kind = known[name], kind_of(known[name])
        how = {"help": setting.metadata.get("help")}
        if name in required:  # its default is never used
            how["help"] = re.sub(r" \(default[^)]*\)", "", how["help"] or "")
        if kind is bool:
            how["action"] = "store_true"
        else:
            default = None if setting.default is MISSING else setting.default
            how |= {"type": kind, "default": defaults.get(name, default), "required": name in required}
            how |= {key: setting.metadata[key] for key in ("choices", "metavar") if key in setting.metadata}
        group.add_argument(f"--{name.replace('_', '-')}", **how)


def read_flags(settings: type[Settings], args: argparse.Namespace) -> Settings:
    """The dataclass with what the flags say; fields without a flag keep their defaults. Raises what it raises."""
    given = vars(args)
    return settings(**{f.name: given[f.name] for f in fields(settings) if f.name in given})


def whole_numbers(text: str) -> list[int]:
    """A flag's type: '1,2,4' -> [1, 2, 4], in ascending order, each once."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"wants whole numbers, such as 1,2,4, and not {text!r}") from None
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"wants numbers of at least 1, got {numbers[0]}")
    return numbers
