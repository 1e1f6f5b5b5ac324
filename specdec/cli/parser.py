"""The parser of a command, made of the table of flags. Nothing here loads torch: help and refusals are immediate."""

import argparse
import difflib
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

from specdec.cli.flags import FLAGS, MEANT, Flag, dashed, rates, whole_numbers
from specdec.cli.limits import LIMITS
from specdec.schema import check_value

Settings = TypeVar("Settings")
FREE_TEXT = ("prompt", "stop")  # flags that check themselves what a text may be
METAVARS = {str: "NAME", int: "N", float: "X", Path: "FILE", whole_numbers: "N,N,...", rates: "X,X,..."}


def help_width() -> int:
    """Columns of a help text: the terminal's, at least 40 and at most 100."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 40), 100)


def reflow(text: str, width: int) -> str:
    """A docstring in lines of at most `width` columns. Lines that are indented, such as examples, stay as they are."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else textwrap.fill(p, width) for p in paragraphs)


class HelpFormatter(argparse.HelpFormatter):
    """Flags and their help side by side, and descriptions with their paragraphs and examples."""

    def __init__(self, prog: str):
        """prog: the name of the command, for its usage line."""
        super().__init__(prog, max_help_position=30, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return reflow(text, width)


class Parser(argparse.ArgumentParser):
    """Parser of flags that raises ValueError, where argparse would print the usage and exit.

    It also rejects an empty text (as of an unset shell variable), a number that is not finite or outside of `LIMITS`,
    and an unknown flag, for which it names the most similar one.
    """

    def parse_args(self, args=None, namespace=None):
        """Return the flags. Raises ValueError for a word that belongs to no flag."""
        given, rest = self.parse_known_args(args, namespace)
        if not rest:
            return given
        word = rest[0]
        if not word.startswith("-"):
            raise ValueError(f"{word} belongs to no flag: a text with spaces needs quotes around it, ' or \"")
        flag = word.partition("=")[0]
        meant = nearest_flags(flag, [name for name in self._option_string_actions if name.startswith("--")])
        there = f"there is {' and '.join(meant)}" if meant else f"{self.prog} --help lists all"
        raise ValueError(f"there is no flag {flag}; {there}")

    def error(self, message: str):
        """Raise ValueError with argparse's message."""
        raise ValueError(f"{message}; {self.prog} --help lists all flags")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]):
        if action.option_strings and arg_strings == ["--"]:  # argparse would take it for no value at all
            raise ValueError(f"{action.option_strings[-1]} takes a value, and '--' is none")
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str):
        flag = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
        if not arg_string.strip() and action.dest not in FREE_TEXT:
            empty = f"{flag} is empty: is a variable of the shell not set?"
            raise ValueError(f"{empty} Leave the flag out, or give a value")
        value = super()._get_value(action, arg_string)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{flag} must be a finite number, got {number}")
            if isinstance(number, int | float) and action.dest in LIMITS:
                check_value(LIMITS[action.dest], number, str(flag))
        return value


def nearest_flags(flag: str, known: Iterable[str]) -> list[str]:
    """Return the flags that a wrong one may mean: the one of `MEANT`, or up to two of a similar name."""
    known = list(known)
    meant = MEANT.get(flag.strip("-").replace("-", "_"), "").replace("_", "-")
    return [f"--{meant}"] if f"--{meant}" in known else difflib.get_close_matches(flag, known, 2)


def make_parser(
    prog: str,
    description: str,
    groups: Mapping[str, str],
    own: Mapping[str, Flag],
    one_of: Sequence[Sequence[str]] = (),
    positional: str = "",
) -> Parser:
    """Return the parser of a command. groups: title -> names; `name!` is required, `name=VALUE` has another default.

    own: flags that differ from the table's. one_of: flags of which one is required. positional: has no flag.
    """
    parser = Parser(prog, description=description, formatter_class=HelpFormatter, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)  # a group of its own takes three lines
    usage = {}
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for word in names.split():
            name, _, default = word.rstrip("!").partition("=")
            flag = own.get(name) or FLAGS[name]
            if default:
                flag = flag._replace(default=flag.kind(default))
            how = _arguments(flag, word.endswith("!"), name == positional)
            group.add_argument(name if name == positional else dashed(name), **how)
            value = "" if flag.kind is bool else f" {how['metavar'] or '|'.join(flag.choices)}"
            usage[name] = f"{value.strip()} ..." if name == positional else f"{dashed(name)}{value}"
            usage[f"{name}!"] = usage[name] if word.endswith("!") or name == positional else ""
    needed = [f"({' | '.join(usage[name] for name in names)})" for names in one_of]
    needed += [text for name, text in usage.items() if name.endswith("!") and text]
    parser.usage = " ".join([prog, *needed, "[options]"])
    return parser


def _arguments(flag: Flag, required: bool, positional: bool) -> dict:
    """Return what argparse takes to add a flag."""
    if flag.kind is bool:
        return {"help": flag.help, "action": "store_true"}
    usual, text = flag.default, flag.help
    if usual not in (None, (), []) and "default" not in text:
        said = ",".join(map(str, usual)) if isinstance(usual, list) else f"{usual:g}" if usual == 0.0 else usual
        text = f"{text} (default {said})"
    if required:  # then nobody meets the default
        text = text.partition(" (default")[0]
    kind: Any = flag.kind
    metavar = flag.metavar or (None if flag.choices else METAVARS[kind])
    how: dict[str, Any] = {"help": text, "type": kind, "metavar": metavar}
    how |= {"choices": flag.choices} if flag.choices else {}
    how |= {"action": "append"} if flag.nargs == "append" else {"nargs": flag.nargs} if flag.nargs else {}
    if not positional:
        how |= {"default": list(usual) if isinstance(usual, list | tuple) else usual, "required": required}
    return how


def with_new_names(prog: str, words: Sequence[str], old: Mapping[str, str]) -> list[str]:
    """Return the words with the new names of flags, and print a line for each old one. old: old name -> new name."""
    found = []
    for word in words:
        flag, equals, value = word.partition("=")
        new = old.get(flag[2:].replace("-", "_")) if flag.startswith("--") else None
        if new is not None:
            new = dashed(new)
            print(f"note: {prog} {flag} is now {new}", file=sys.stderr)
        found.append(word if new is None else f"{new}{equals}{value}")
    return found


def read_flags(settings: type[Settings], args: argparse.Namespace) -> Settings:
    """The dataclass with what the flags say; fields without a flag keep their defaults. Raises what it raises."""
    given = vars(args)
    return settings(**{f.name: given[f.name] for f in fields(cast(Any, settings)) if f.name in given})
