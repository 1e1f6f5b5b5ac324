"""Settings files: flags of `specdec generate` as YAML, with a report of where they come from.

Every key but `report` is a flag, with underscores for hyphens. A flag that is typed wins over the file. Entries of the
file that contradict it are left out: with --topk typed, a tree of the file is.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from specdec.cli.flags import FLAGS, MODELS, RULE, SAMPLING, TREE, dashed
from specdec.cli.parser import Parser
from specdec.registry import read_yaml

REPORT = "report"
KINDS = {name: FLAGS[name].kind for name in (*MODELS, *TREE, *RULE, *SAMPLING, "no_draft")}
NAMED = {int: "a whole number", float: "a number", bool: "true or false"}

OF_TARGET = {"target", "dtype", "matmul_precision", "device", "allow_nonfinite", "tp_plan", "device_map"}
OF_DRAFTER = set(MODELS) - OF_TARGET
DRAFTING = tuple(name for name in (*MODELS, *TREE, *RULE) if name not in OF_TARGET)
NOT_A_TREE = ("topk", "steps", "num_draft_tokens", "sample_draft")  # what contradicts --tree, which is a whole tree
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
        kind: Any = KINDS[name] if KINDS[name] in NAMED else str
        taken = (int, float) if kind is float else (kind,)
        if value is not None and type(value) not in taken:  # a bool would pass for an int
            raise ValueError(f"{path}: {name} takes {NAMED.get(kind, 'a text')}, and not {value!r}")
    return entries


def with_settings(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line in which --settings FILE is replaced by the flags in the file."""
    given = parser.parse_args(words)
    if getattr(given, "settings", None) is None:
        return given
    entries = read_settings(given.settings)
    for name, gives_way in GIVES_WAY.items():
        if getattr(given, name) not in (None, False):
            entries = {key: value for key, value in entries.items() if key not in gives_way}
    flags = []
    for name, value in entries.items():
        flag = dashed(name)
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:  # 0 is a value, though it is equal to False
            flags.append(f"{flag}={value}")
    try:
        known = vars(parser.parse_args(flags))
    except ValueError as error:  # of a flag that was not typed
        raise ValueError(f"{given.settings}: {error}") from None
    return parser.parse_args(words, argparse.Namespace(**known))
