"""Settings files: flags of `specdec generate` as YAML, with a report of where they come from.

Every key but `report` is a flag, with underscores for hyphens. A flag that is typed wins over the file. Entries of the
file that contradict it are left out: with --topk typed, a tree of the file is.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields

from specdec.api import ModelSettings
from specdec.cli.flags import kind_of
from specdec.registry import read_yaml
from specdec.structs import Sampling
from specdec.trees.base import WORDS
from specdec.trees.spec import TreeSettings
from specdec.verify import VerifierSettings

REPORT = "report"
# Every key and its type. A path is a text here.
KINDS = {f.name: kind_of(f) for part in (ModelSettings, TreeSettings, VerifierSettings, Sampling) for f in fields(part)}
KINDS |= {"no_draft": bool}
NAMED = {int: "a whole number", float: "a number", bool: "true or false"}

OF_TARGET = {"target", "dtype", "matmul_precision", "device", "allow_nonfinite", "tp_plan", "device_map"}
OF_DRAFTER = {f.name for f in fields(ModelSettings)} - OF_TARGET
DRAFTING = tuple(
    f.name for part in (ModelSettings, TreeSettings, VerifierSettings) for f in fields(part) if f.name not in OF_TARGET
)
NOT_A_TREE = (*WORDS, "sample_draft")  # what contradicts --tree, which is a whole tree
# A flag that is typed -> the entries of a file that give way to it.
GIVES_WAY = {
    **{name: {"no_draft"} for name in DRAFTING},
    **{name: {"no_draft", "tree"} for name in NOT_A_TREE},
    "draft": {"no_draft", *OF_DRAFTER} - {"draft"},
    "tree": {"no_draft", *NOT_A_TREE},
    "no_draft": set(DRAFTING),
}


def read_settings(path: str | os.PathLike) -> dict:
    """The entries of a settings file without its report. Raises ValueError, one sentence, for anything else."""
    entries = read_yaml(path, "settings")
    if not isinstance(entries, dict):
        raise ValueError(f"{path} holds no settings: it is not a mapping of names to values")
    entries.pop(REPORT, None)
    for name, value in entries.items():
        if name not in KINDS:
            raise ValueError(f"{path}: unknown setting {name!r}; known are {', '.join(KINDS)}, and {REPORT}")
        kind = KINDS[name] if KINDS[name] in NAMED else str
        taken = (int, float) if kind is float else (kind,)
        if value is not None and type(value) not in taken:  # a bool would pass for an int
            raise ValueError(f"{path}: {name} takes {NAMED.get(kind, 'a text')}, and not {value!r}")
    return entries


def parse_with_settings(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line in which --settings FILE is replaced by the flags in the file."""
    given = parser.parse_args(argv)
    if given.settings is None:
        return given
    entries = read_settings(given.settings)
    for name, gives_way in GIVES_WAY.items():
        if getattr(given, name) not in (None, False):
            entries = {key: value for key, value in entries.items() if key not in gives_way}
    flags = []
    for name, value in entries.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:  # 0 is a value, though it is equal to False
            flags.append(f"{flag}={value}")
    try:
        known = vars(parser.parse_args(flags))
    except ValueError as error:  # of a flag that was not typed
        raise ValueError(f"{given.settings}: {error}") from None
    return parser.parse_args(argv, argparse.Namespace(**known))
