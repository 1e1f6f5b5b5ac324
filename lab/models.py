"""The target and the drafter that a command of the lab works on: flags, names, loading."""

import argparse
from pathlib import Path

from specdec.api import DEMO_DRAFTER, DEMO_TARGET, load_drafter, load_target
from specdec.contracts import Drafter
from specdec.model.target import Target
from specdec.text import encode_prompt, read_prompts


def bundled(name: str) -> str:
    """The path of a bundled drafter or file that a setting names demo/NAME; every other name as it is."""
    return str(DEMO_TARGET.parent / name.removeprefix("demo/")) if name.startswith("demo/") else name


def add_model_flags(parser: argparse._ActionsContainer) -> None:
    """The flags that `load_models` reads."""
    parser.add_argument("--target", help="folder or hub name of the target (default: the bundled demo)")
    parser.add_argument("--draft", help="its drafter, as specdec generate takes it (default: the demo's)")
    parser.add_argument("--dtype", default="auto", help="as specdec generate takes it")
    parser.add_argument("--device", default="cpu")


def load_models(args: argparse.Namespace, **drafter_settings) -> tuple[Target, Drafter]:
    """The pair that the flags name. drafter_settings: those of `specdec.load_drafter`.

    Raises ValueError for a target without its drafter: the demo's fits no other target."""
    check_models(args)
    target = load_target(args.target or DEMO_TARGET, dtype=args.dtype, device=args.device)
    return target, load_drafter(args.draft or DEMO_DRAFTER, target, **drafter_settings)


def check_models(args: argparse.Namespace) -> None:
    if args.target is not None and args.draft is None:
        raise ValueError("a target of your own needs its drafter: give --draft")


def read_encoded(target: Target, file: Path, limit: int | None, raw: bool = False) -> list[list[int]]:
    """Token ids of the first `limit` prompts of a file, in the target's chat template unless `raw`."""
    return [encode_prompt(target, prompt, raw) for prompt in read_prompts(file)[:limit]]


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raise ValueError unless each of these flags is at least 1, or was not given."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
