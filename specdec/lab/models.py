"""The target and the drafter that a command of the lab works on: flags, names, loading."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.cli.parser import read_flags
from specdec.contracts import Drafter
from specdec.model.language_model import LanguageModel
from specdec.model_settings import ModelSettings
from specdec.schema import shown
from specdec.text import encode_prompt, read_prompts

TEXTS = ("draft", "name", "token_map", "feedback")  # of an entry


def as_list(value: Any) -> list:
    """Return a list as it is, and any other value as a list of one."""
    return value if isinstance(value, list) else [value]


def load_models(args: argparse.Namespace) -> tuple[LanguageModel, Drafter]:
    """The pair that the flags name. Raises ValueError for a target without its drafter."""
    models = read_flags(ModelSettings, args)
    models.check_pair()
    target = models.load_target()
    return target, models.load_drafter(target)


def read_encoded(target: LanguageModel, file: Path, limit: int | None, raw: bool = False) -> list[list[int]]:
    """Token ids of the first `limit` prompts of a file, in the target's chat template unless `raw`."""
    return [encode_prompt(target, prompt, raw) for prompt in read_prompts(file)[:limit]]


def read_entry(entry: object, known: Sequence[str], where: str) -> dict:
    """A drafter that settings name, or describe by a mapping of `known` fields. ValueError for any other field."""
    given = dict(entry) if isinstance(entry, Mapping) else {"draft": entry}
    unknown = set(given) - set(known)
    if unknown or given.get("draft") is None:
        wrong = f"has the unknown field {min(unknown)}" if unknown else "lacks the field draft"
        raise ValueError(f"{where} {wrong}; known are {', '.join(known)}")
    for name, value in given.items():
        if name in TEXTS and not isinstance(value, str | Path | None):
            raise ValueError(f"{where}: {name} must be a text, got {shown(value)}")
    return given


def short_name(path: str | Path) -> str:
    """What a drafter is called: as the end of its path. The folder `draft` of a run is called as the run."""
    path = Path(str(path).rstrip("/"))
    return path.parent.name if path.name == "draft" and path.parent.name else path.name


def own_names(entries: Sequence, name_of: Callable[[Any, bool], str]) -> list[str]:
    """Return distinct names: `name_of(entry, False)`, or, if others have that too, `name_of(entry, True)`.

    Raises ValueError if two names are still the same.
    """
    short = [name_of(entry, False) for entry in entries]
    names = [name_of(entry, short.count(name) > 1) for entry, name in zip(entries, short, strict=True)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two drafters are called {twice}: give one another name, as {{draft: ..., name: ...}}")
    return names
