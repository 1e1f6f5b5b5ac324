"""How the lab's commands print tables and write their files."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from specdec.cli.files import write_text, write_whole


def progress_bar(name: str) -> Callable[[int, int], None]:
    """A function that shows a bar on a terminal: call it with the number of steps done and of all."""
    bar = None

    def show(done: int, of: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(desc=name, total=of, mininterval=1.0, disable=None)
        bar.update(done - bar.n)
        if done == of:
            bar.close()

    return show


def write_json(path: Path, content: object) -> None:
    """Write a file of indented JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write rows that all have the first one's keys, under a line of those keys."""

    def fill(aside: Path) -> None:
        with aside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)

    write_whole(path, fill)


def write_figure(path: Path, figure) -> None:
    """Write a figure of matplotlib as PNG."""
    write_whole(path, lambda aside: figure.savefig(aside, dpi=130, format="png"))
