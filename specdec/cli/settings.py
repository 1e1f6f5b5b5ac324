"""Settings files: flags of `python -m specdec.generate` as YAML, with a report of where they come from.

Every key but `report` is a flag with underscores for hyphens. What is typed on the command line comes after the file
and wins; where it contradicts a whole entry of the file (a tree file against topk), that entry gives way.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

SHAPE = ("steps", "topk", "num_draft_tokens")
DRAFTER = ("draft", "token_map", "feedback", "draft_dtype")
MODELS = ("target", *DRAFTER, "dtype", "device")
DRAFTING = (*DRAFTER, *SHAPE, "sample_draft", "tree", "verifier", "verifier_args")
SAMPLING = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
}
KEYS = (*dict.fromkeys((*MODELS, *DRAFTING, *SAMPLING)), "no_draft")
REPORT = "report"
# All others are text.
KINDS = dict.fromkeys(SHAPE, int) | dict.fromkeys(("no_draft", "sample_draft"), bool) | SAMPLING
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
# What is typed, and the entries of a file that give way to it.
GIVES_WAY = {
    **{name: {"no_draft"} for name in DRAFTING},
    **{name: {"no_draft", "tree"} for name in (*SHAPE, "sample_draft")},
    "draft": {"no_draft", *DRAFTER} - {"draft"},
    "tree": {"no_draft", "sample_draft", *SHAPE},
    "no_draft": set(DRAFTING),
}


def read_settings(path: str | os.PathLike) -> dict:
    """The entries of a settings file without its report. Raises ValueError, one sentence, for anything else."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no such settings file: {path}")
    try:
        content = OmegaConf.load(file)
    except (YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} is not a YAML file: {str(error).splitlines()[0]}") from None
    if not isinstance(content, DictConfig):
        raise ValueError(f"{path} holds no settings: it is not a mapping of names to values")
    entries = OmegaConf.to_container(content)
    entries.pop(REPORT, None)
    for name, value in entries.items():
        if name not in KEYS:
            raise ValueError(f"{path}: unknown setting {name!r}; known are {', '.join(KEYS)}, and {REPORT}")
        kind = KINDS.get(name, str)
        taken = (int, float) if kind is float else (kind,)
        if value is not None and type(value) not in taken:  # a bool would pass for an int
            raise ValueError(f"{path}: {name} takes {WORDS[kind]}, and not {value!r}")
    return entries


def parse_with_settings(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line of which --settings FILE stands for the flags in the file."""
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
        elif value not in (None, False):
            flags.append(f"{flag}={value}")
    known = vars(parser.parse_args(flags))
    return parser.parse_args(argv, argparse.Namespace(**known))
