"""Where commands write: folders for results, and files that are whole or not there."""

import os
from collections.abc import Callable
from pathlib import Path


def output_folder(path: Path | str) -> Path:
    """A folder for results, made if it is not there. Raises ValueError if nothing can be written there."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"cannot write to {path}: no permission")
    return path


def write_whole(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a file beside `path`, and put it in place when it is whole."""
    aside = path.with_name(path.name + ".partial")
    try:
        fill(aside)
        os.replace(aside, path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
