"""How the lab's commands print tables and write their files."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from specdec.cli.files import write_text, write_whole


def progress_bar(name: str) -> Callable[[int, int], None]:
    """A function that shows a bar: call it with the number of steps done and of all."""
    bar = None

    def show(done: int, of: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(desc=name, total=of, mininterval=1.0 if sys.stderr.isatty() else 5.0)
        bar.update(done - bar.n)
        if done == of:
            bar.close()

    return show


def stage(text: str) -> None:
    """Print what a command does next, where that may take long."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def write_json(path: Path, content: object) -> None:
    """Write a file of indented JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write rows that all have the first one's keys, under a line of those keys."""

    def fill(staging: Path) -> None:
        with staging.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)

    write_whole(path, fill)


def write_figure(path: Path, figure) -> None:
    """Write a figure of matplotlib as PNG."""
    write_whole(path, lambda staging: figure.savefig(staging, dpi=130, format="png"))


def sentence(error: Exception) -> str:
    """Return what went wrong in one line: our own sentences as they are, other errors with their type."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, ValueError) and line else f"{type(error).__name__}: {line}"
