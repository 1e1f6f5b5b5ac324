"""What a result says about the machine, the software and the command that made it."""

import platform
import shlex
import sys
import time

import torch

from specdec.cli.revision import revision
from specdec.engine.recorder import versions
from specdec.machine import machine, processor
from specdec.threads import full_threads


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
