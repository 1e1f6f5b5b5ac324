"""Where commands write: folders for results, and files and folders that are there whole or not at all.

No other module writes a partial file and renames it. New content is forced to the disk before it gets its name, so that
after a kill or a power cut either the old content or the new is there. A kill may leave NAME.partial or NAME.replaced,
which the next write of the same name removes.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from platformdirs import user_cache_path
from safetensors import SafetensorError

Made = TypeVar("Made")
DAY = 86_400  # seconds


def output_folder(path: Path | str) -> Path:
    """Make and return a folder for results. Raises ValueError if nothing can be written there."""
    path = Path(path)
    whole = path.resolve()
    if whole.is_dir() and (whole.parent == Path(whole.anchor) or whole == Path.home()):
        raise ValueError(f"{path} is a folder of the system, or your home: give a folder of its own for results")
    with _one_sentence(path, "cannot write to"):
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise ValueError(f"cannot write to {path}: no permission")
    return path


@contextmanager
def no_empty_folder(path: Path | str) -> Iterator[None]:
    """Remove the folder, and those above it, if an error ends the block and they are new and hold nothing."""
    path = Path(path).absolute()
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def kept_folder(name: str) -> Path:
    """Make and return a folder of the user's cache. Raises ValueError if nothing can be written there."""
    try:
        return output_folder(user_cache_path("specdec") / name)
    except ValueError as error:
        raise ValueError(f"{error}; set XDG_CACHE_HOME to a folder for caches") from None


@dataclass(frozen=True)
class CachedJson:
    """What was measured under an identity: a JSON file in a folder of the user's cache. It need not be there."""

    folder: str
    identity: Mapping

    @property
    def file(self) -> Path:
        """The path of the JSON file, named after a digest of the identity."""
        return user_cache_path("specdec") / self.folder / f"{_digest(self.identity)[:16]}.json"

    def read(self, of: Callable[[dict], Made]) -> Made | None:
        """Return what `of` makes of the entries. None if there is no file, or if it is damaged or was edited."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            return of(content) if content.pop("sha256") == _digest(content) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def write(self, entries: Mapping) -> None:
        """Write these entries, and the identity with them. If the cache cannot be written, print a note."""
        content = json.loads(json.dumps({**entries, "identity": self.identity}, default=str))
        try:
            output_folder(self.file.parent)
            write_text(self.file, json.dumps(content | {"sha256": _digest(content)}, indent=1) + "\n")
        except ValueError as error:
            print(f"note: {error}; the measurement is not cached", file=sys.stderr)


def _digest(content: Mapping) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def check_writable(path: Path) -> None:
    """Raise ValueError if no file can be written at `path`. Nothing is left there."""
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; give a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if _is_stream(path):
        return
    staging = partial_path(path)
    with _one_sentence(path):
        there = staging.exists()
        staging.open("ab").close()
        if not there:
            staging.unlink()


def check_makeable(folder: Path) -> None:
    """Raise ValueError if `replace_folder` cannot put a folder there. Nothing is left, not even by a killed one."""
    whole = Path(os.path.realpath(folder))
    top = next(part for part in (whole, *whole.parents) if part.parent.exists())
    with _one_sentence(folder):
        if top == whole:
            shutil.rmtree(partial_path(top), ignore_errors=True)
        partial_path(top).mkdir()
        partial_path(top).rmdir()


def write_whole(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a partial file, renamed to `path` when it is whole. Raises ValueError; then nothing changes.

    A link stays, and the file that it names is replaced. A device or a pipe, such as /dev/null, is written directly.
    """
    if _is_stream(path):
        with _one_sentence(path):
            fill(path)
        return
    staging = partial_path(path)
    with _one_sentence(path), _removed_on_error(staging):
        fill(staging)
        put_in_place(path)


def keep(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` make a file or folder in a temporary folder, then move it to `path` when it is whole.

    Several processes may make the same `path` at once. What a killed process left is removed a day later.
    """
    for leftover in path.parent.glob(f"{path.name}.*.partial"):
        with suppress(OSError):  # another process was faster
            if time.time() - leftover.stat().st_mtime > DAY:
                shutil.rmtree(leftover)
    prefix, suffix = f"{path.name}.", ".partial"
    with _one_sentence(path), tempfile.TemporaryDirectory(suffix, prefix, path.parent) as staging:
        made = Path(staging) / path.name
        fill(made)
        for part in (*made.rglob("*"), made):
            _sync(part)
        try:
            os.replace(made, path)
        except OSError:
            if not path.is_dir():  # else another process was faster
                raise


def write_text(path: Path, text: str) -> None:
    """`write_whole` for a text, in UTF-8."""
    write_whole(path, lambda staging: staging.write_text(text, encoding="utf-8"))


def partial_path(path: Path) -> Path:
    """What a file or folder is called while it is written. That of a link is next to what the link names."""
    place = Path(os.path.realpath(path))
    return place.with_name(place.name + ".partial")


def _is_stream(path: Path) -> bool:
    return path.is_char_device() or path.is_fifo()


def put_in_place(path: Path) -> None:
    """Give the file at `partial_path(path)` its name. Raises OSError."""
    _sync(partial_path(path))
    path = Path(os.path.realpath(path))
    os.replace(partial_path(path), path)
    with suppress(OSError):  # some file systems cannot
        _sync(path.parent)


def check_replaceable(folder: Path, files: Collection[str], kind: str) -> None:
    """Raise ValueError if the folder holds anything but these files, those of `kind` ('a drafter')."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose a folder to write to")
    if others := sorted(p.name for p in folder.glob("*") if p.name not in files):
        raise ValueError(f"{folder} holds {others[0]}, which is not of {kind}; choose another folder to write to")


def replace_folder(folder: Path, fill: Callable[[Path], object], files: Collection[str], kind: str) -> None:
    """Let `fill` write `files` into a folder next to `folder`, and rename that when it is whole.

    Raises ValueError if the disk does not take it, or if the folder holds anything but `files`; then nothing changes.
    """
    check_replaceable(folder, files, kind)
    place = Path(os.path.realpath(folder))  # a link stays
    staging, old = partial_path(place), place.with_name(place.name + ".replaced")
    with _one_sentence(folder), _removed_on_error(staging):
        if old.exists() and not place.exists():  # a kill came between the two renames below
            old.rename(place)
        for leftover in (staging, old):
            if leftover.exists():
                shutil.rmtree(leftover)
        staging.mkdir(parents=True)
        fill(staging)
        for part in (*staging.rglob("*"), staging):
            if part.is_file():
                part.chmod(staging.stat().st_mode & 0o666)  # safetensors lets the owner alone read its files
            _sync(part)
        _exchange(place, staging, old)


def _exchange(folder: Path, new: Path, old: Path) -> None:
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    with suppress(OSError):
        _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Force a file's content, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _removed_on_error(staging: Path) -> Iterator[None]:
    """Nothing but a kill leaves a part of what was to be written."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        with suppress(OSError):
            shutil.rmtree(staging) if staging.is_dir() else staging.unlink(missing_ok=True)
        raise


@contextmanager
def _one_sentence(path: Path, cannot: str = "cannot write") -> Iterator[None]:
    """Turn what the system refuses into a ValueError that names the path and the reason."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch's zip writer hides the reason in an error of its own.
        cause = error.__cause__ or error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError | SafetensorError):
            raise
        raise ValueError(f"{cannot} {path}: {getattr(cause, 'strerror', None) or str(cause).splitlines()[0]}") from None
