"""How the lab's commands print and write results, and what a result says about machine, software and command."""

import csv
import json
import platform
import shlex
import sys
import time
from pathlib import Path

import torch

from specdec.cli.files import write_text, write_whole
from specdec.cli.revision import revision
from specdec.engine.recorder import versions
from specdec.machine import machine, processor
from specdec.threads import full_threads


def stage(text: str) -> None:
    """Print what a command does next, where that may take long."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def write_json(path: Path, content: object) -> None:
    """Write a file of indented JSON, whole or not at all. What is no finite number is null, as JSON has no NaN."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    write_text(path, json.dumps(finite, indent=1) + "\n")


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


def machine_in_short() -> dict:
    """Three entries for results that are compared on one machine only."""
    return {"machine": processor(), "threads": full_threads(), "torch": torch.__version__}


def command_line() -> str:
    """The command that runs now, as one types it."""
    program, *words = sys.argv
    module = sys.modules["__main__"].__spec__
    if program.startswith("specdec "):
        head = program.split()
    elif module is not None:  # python -m
        head = ["python", "-m", module.name]
    else:
        head = ["python", program]
    return shlex.join([*head, *words])


def provenance(device: torch.device) -> dict:
    """Where, with what and how a result came to be: machine, versions, revision of the code, command, time."""
    return {
        "machine": machine(device) | {"platform": platform.platform(), "device": str(device)},
        "versions": versions() | ({"cuda": torch.version.cuda} if device.type == "cuda" else {}),
        "revision": revision(),
        "command": command_line(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
