"""Checkpoints of a run: `checkpoints/step-00000200.pt`, each whole or not there, the last few kept.

A checkpoint is a zip with a checksum for every tensor. One that was cut off or altered is recognised by these, and the
one before it is used.
"""

import pickle
import re
import sys
import zipfile
from functools import partial
from pathlib import Path

import torch

from specdec.cli.files import output_folder, write_whole

FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{8,})\.pt")


def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of the run in `out`, oldest first."""
    found = {p: NAME.fullmatch(p.name) for p in (out / FOLDER).glob("step-*.pt")}
    return sorted((p for p, match in found.items() if match), key=lambda p: int(found[p][1]))


def write_checkpoint(out: Path, step: int, state: dict, keep: int) -> Path:
    """Write the state after `step`, then delete all checkpoints but the last `keep`. state: tensors and plain values.

    Raises ValueError if the disk does not take it. What was there before stays.
    """
    path = out / FOLDER / f"step-{step:08d}.pt"
    try:
        write_whole(output_folder(path.parent) / path.name, partial(save_state, state))
    except ValueError as error:
        last = next(reversed(checkpoints(out)), None)
        rest = f"{last} is the last good one, and resume=true goes on from it" if last else "there is none before it"
        raise ValueError(f"{error}; {rest}") from None
    for old in checkpoints(out)[:-keep]:
        old.unlink()
    return path


def save_state(state: object, path: Path) -> None:
    """`torch.save` through a file of ours: through a file of its own it hides why the system refuses to write."""
    with path.open("wb") as file:
        torch.save(state, file)


def read_newest(out: Path, warn: bool = True) -> tuple[Path, dict]:
    """Path and state, on the CPU, of the newest checkpoint that is sound.

    One sentence on standard error tells of each newer one that is not. Raises ValueError if none is.
    """
    paths = checkpoints(out)
    if not paths:
        raise ValueError(f"nothing to resume: {out / FOLDER} holds no checkpoint")
    for path in reversed(paths):
        try:
            return path, read_checkpoint(path)
        except ValueError as error:
            if warn:
                print(f"warning: {error}; the one before it is used", file=sys.stderr)
    raise ValueError(f"nothing to resume: every checkpoint in {out / FOLDER} is damaged or not ours")


def read_checkpoint(path: Path) -> dict:
    """A checkpoint's state on the CPU. Raises ValueError if any byte of it is not what was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"the checksum of {broken} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not ours: {str(error).splitlines()[0]}") from None
