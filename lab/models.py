"""The target and the drafter that a command of the lab works on: flags, names, loading."""

import argparse
from pathlib import Path

from specdec.api import DEMO_TARGET, ModelSettings
from specdec.cli.flags import add_flags, read_flags
from specdec.contracts import Drafter
from specdec.model.target import Target
from specdec.text import encode_prompt, read_prompts


def bundled(name: str) -> str:
    """What a setting names: demo/NAME is a bundled drafter or file, and every other name stays as it is."""
    return str(DEMO_TARGET.parent / name.removeprefix("demo/")) if name.startswith("demo/") else name


def add_model_flags(group: argparse._ActionsContainer, *more: str) -> None:
    """The flags that `load_models` reads. more: further fields of `ModelSettings`."""
    add_flags(group, ModelSettings, "target", "draft", *more, "dtype", "device")


def load_models(args: argparse.Namespace) -> tuple[Target, Drafter]:
    """The pair that the flags name. Raises ValueError for a target without its drafter."""
    models = read_flags(ModelSettings, args)
    models.check_pair()
    target = models.load_target()
    return target, models.load_drafter(target)


def read_encoded(target: Target, file: Path, limit: int | None, raw: bool = False) -> list[list[int]]:
    """Token ids of the first `limit` prompts of a file, in the target's chat template unless `raw`."""
    return [encode_prompt(target, prompt, raw) for prompt in read_prompts(file)[:limit]]


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raise ValueError unless each of these flags is at least 1, or was not given."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
