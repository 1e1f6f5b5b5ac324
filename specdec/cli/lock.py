"""One writer to an output: a second process is refused, and told who has it.

The lock is the system's (`flock`), which ends with its process however that ends. So the lock of a dead owner is simply
free. The file says who holds it, for the message, and goes when the work is done.
"""

import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def only_writer(out: Path | str, inside: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold the output `out` while its writer works. inside: it is a folder that is written into, and the lock lies
    there; else it is replaced as a whole, and the lock lies beside it. wait: until it is free, instead of refusing.

    Raises ValueError, with process and host, if another process holds it, or if no lock can be made there."""
    out = Path(os.path.abspath(out))
    lock = out / ".writer.lock" if inside else out.with_name(f".{out.name}.lock")
    made = [folder for folder in lock.parents if not folder.exists()]
    file = _take(lock, out, wait)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # before it is free, so that nobody takes a lock that is about to go
        os.close(file)
        for folder in made:  # where nothing was written nothing is left
            with suppress(OSError):
                folder.rmdir()


def _take(lock: Path, out: Path, wait: bool) -> int:
    """The descriptor of the lock's file, which is held."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                owner = _owner(file)
                os.close(file)
                raise ValueError(
                    f"{out} is being written by {owner}: wait for it, end it, or choose another place"
                ) from None
            if _is_at(file, lock):
                break
            os.close(file)  # its owner was done with it between the two calls
        _sign(file, out)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}") from None
    return file


def _is_at(file: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), lock.stat())
    except FileNotFoundError:
        return False


def _owner(file: int) -> str:
    try:
        said = json.loads(os.pread(file, 4096, 0))
        return f"process {said['pid']} on {said['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _sign(file: int, out: Path) -> None:
    """Write down who holds the lock, and tell of an owner that ended without letting go."""
    if os.fstat(file).st_size:
        print(f"note: {_owner(file)}, which wrote {out}, has ended; this process goes on", file=sys.stderr)
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
