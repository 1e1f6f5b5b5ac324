"""How every command begins and ends: a user's mistake is one sentence on standard error and exit code 2."""

import errno
import functools
import os
import sys
from collections.abc import Callable

from specdec.cli.signals import Terminated, terminable

OF_STREAMS = (errno.ENOSPC, errno.EIO, errno.EBADF)  # without a file's name: files are written by `cli.files`
OF_TORCH = ("DefaultCPUAllocator", "out of memory")  # in what torch says when there is not enough memory


def one_sentence_errors(main: Callable) -> Callable:
    """`main`, with its ValueError printed as 'error: ...' and exit code 2. So is what the system refuses: a file that
    cannot be read, a full disk behind standard output, memory that is not there. Any other exception is a bug of ours,
    and keeps its traceback. SIGINT exits with 130, SIGTERM with 143. A reader that went away, as `head` does, is no
    error.
    A standard stream that is closed is an empty one: nothing is read from it, and nothing written is kept."""

    @functools.wraps(main)
    def wrapped(*args, **kwargs):
        open_streams()
        try:
            with terminable():
                result = main(*args, **kwargs)
            sys.stdout.flush()
            return result
        except ValueError as error:
            fail(str(error))
        except Terminated:
            print("terminated", file=sys.stderr)
            sys.exit(143)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        except BrokenPipeError:
            silence()
            sys.exit(0)
        except OSError as error:
            silence()
            what = "cannot write to standard output" if error.errno in OF_STREAMS else "the system refuses"
            what = f"cannot use {error.filename}" if error.filename else what
            fail(f"{what}: {error.strerror or error}")
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not any(words in str(error) for words in OF_TORCH):
                raise
            fail("there is not enough memory for these settings: take smaller ones, or a machine with more")

    return wrapped


def fail(message: str) -> None:
    """Print a user's mistake, and end with exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def open_streams() -> None:
    """Put the null device in the place of standard streams that are closed: the next file that is opened would else
    get their number, and what is printed would get into it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (to the end of the process)


def silence() -> None:
    """Drop what standard output still holds and will never take: Python would complain of it at the end."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
