"""What a result says about the machine, the software and the command that made it."""

import os
import platform
import shlex
import sys
import time
from pathlib import Path

import torch

from specdec.cli.revision import revision
from specdec.engine.recorder import versions


def processor() -> str:
    """The processor's name as Linux tells it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def machine(device: torch.device) -> dict:
    """What a time depends on beside the code: processor, cores, torch's threads, device."""
    kind = {"cpu": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": str(device)}
    return kind | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def machine_in_short() -> dict:
    """Three entries for results that are compared on one machine only."""
    return {"machine": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}


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
