"""One writer to an output: a second process is refused, and the message names the owner.

The system's lock ends with its process, however that ends, so the lock of a dead process is free.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def only_writer(out: Path | str, inside: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold the output `out`, a file or folder, while its writer works. Raises ValueError if another process does.

    inside: the lock file is inside the folder `out`, whose files are written one by one. wait: wait until it is free.
    """
    out = Path(os.path.realpath(out))
    path = out / ".writer.lock" if inside else out.with_name(f".{out.name}.lock")
    made = [folder for folder in path.parents if not folder.exists()]
    lock = FileLock(path, timeout=-1 if wait else 0, fallback_to_soft=False)
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            if path.stat().st_size:
                print(f"note: {_owner(path)}, which wrote {out}, has ended; this process goes on", file=sys.stderr)
            path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        except Timeout:
            if not path.exists():  # a file system that has no files of ours
                raise ValueError(f"cannot write {out}: no file can be made in {path.parent}") from None
            owner = f"is being written by {_owner(path)}"
            raise ValueError(f"{out} {owner}: wait for it, end it, or choose another place") from None
        except OSError as error:
            raise ValueError(f"cannot write {out}: {error.strerror}") from None
        yield
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)  # before the release, so that no other process can have locked this file
            lock.release()
        for folder in made:  # leave no empty folders
            with suppress(OSError):
                folder.rmdir()


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
