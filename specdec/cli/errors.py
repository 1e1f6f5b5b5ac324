"""How every command begins and ends: a user's mistake is one sentence on standard error and exit code 2."""

import errno
import functools
import os
import sys
from collections.abc import Callable

from specdec.cli.signals import Terminated, terminable
from specdec.ranks import GONE, first_to_end, world

OF_STREAMS = (errno.ENOSPC, errno.EIO, errno.EBADF)  # without a file's name: files are written by `cli.files`
OF_TORCH = ("DefaultCPUAllocator", "out of memory")  # in what torch says when there is not enough memory


def one_sentence_errors(main: Callable) -> Callable:
    """Wrap `main` so that a user's mistake prints one sentence and exits with code 2.

    - A ValueError is printed as "error: ...". So are errors of the system: an unreadable file, a full disk, no memory.
    - Any other exception is a bug of ours, and keeps its traceback.
    - SIGINT exits with 130, SIGTERM with 143. A closed pipe, as after `| head`, is no error.
    - A closed standard stream acts as an empty one: reads get nothing, writes are lost.
    - Of several processes the first one reports the error, and its launcher ends the others.
    """

    @functools.wraps(main)
    def wrapped(*args, **kwargs):
        open_streams()
        try:
            with terminable():
                result = main(*args, **kwargs)
            sys.stdout.flush()
            return result
        except ValueError as error:
            fail(f"error: {error}")
        except Terminated:
            fail("terminated", 143)
        except KeyboardInterrupt:
            fail("interrupted", 130)
        except BrokenPipeError:
            silence()
            sys.exit(0 if world() == 1 else 141)  # the launcher ends the others then
        except OSError as error:
            silence()
            what = "cannot write to standard output" if error.errno in OF_STREAMS else "the system refuses"
            what = f"cannot use {error.filename}" if error.filename else what
            fail(f"error: {what}: {error.strerror or error}")
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or any(words in str(error) for words in OF_TORCH):
                fail("error: there is not enough memory for these settings: take smaller ones, or a machine with more")
            if world() > 1 and any(words in str(error) for words in GONE):
                fail("error: another of the processes has ended, and this one cannot go on without it")
            _speak()
            raise
        except Exception:
            _speak()
            raise

    return wrapped


def fail(message: str, code: int = 2) -> None:
    """Print a message and exit, with code 2 for a user's mistake. Of several processes only the first one prints."""
    _speak()
    if first_to_end():
        print(message, file=sys.stderr)
    sys.exit(code)


def _speak() -> None:
    """Restore the standard error of a process that `ranks.silence` has silenced."""
    if world() > 1 and sys.__stderr__ is not None:
        sys.stderr = sys.__stderr__


def open_streams() -> None:
    """Open the null device for each closed standard stream, whose number the next opened file would get."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (to the end of the process)


def silence() -> None:
    """Drop the buffered standard output that can no longer be written, which Python would report at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
