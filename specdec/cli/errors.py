"""How every command begins and ends: a mistake is one sentence and exit code 2; SIGTERM and SIGINT stop it."""

import errno
import functools
import io
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from specdec.own import place_of
from specdec.ranks import GONE, first_to_end, largest, world
from specdec.threads import Call

OF_STREAMS = (errno.ENOSPC, errno.EIO, errno.EBADF)  # without a file's name: files are written by `cli.files`
OF_TORCH = ("DefaultCPUAllocator", "out of memory")  # in what torch says when there is not enough memory


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised as Ctrl-C is, so that the same clean-up code handles both."""


class StopSignals:
    """While open, the first SIGTERM or SIGINT is noted, and the command polls `asked` at safe points.

    Later signals do nothing, because launchers send several; with `insist` the second one is raised. Processes with the
    same rounds have `shared` signals: all of them stop after the same round.
    """

    def __init__(self, then: str = "finishing the step, then saving", insist: bool = False, shared: bool = False):
        """then: what the command does after a signal, for its message."""
        self.then, self.insist, self.shared = then, insist, shared
        self.number: int | None = None  # of the first signal
        self.agreed: int | None = None  # the signal that all processes know of

    @property
    def asked(self) -> bool:
        """Whether a signal has asked the command, or all of the processes, to stop."""
        return (self.agreed if self.shared else self.number) is not None

    @property
    def code(self) -> int:
        """The exit code of a process that a signal has ended, as shells have it: 130 or 143.

        It is 143 if another process got the signal.
        """
        return 128 + ((self.agreed if self.shared else self.number) or signal.SIGTERM)

    def meet(self, emitted: list[list[int]]) -> None:
        """Called after each round with its tokens. Raises ValueError if not all processes have the same ones."""
        if not self.shared:
            return
        state = zlib.crc32(repr(emitted).encode())
        most, least, number = largest([state, -state, self.number or 0])
        if most != -least:
            raise ValueError("the processes that share the target have drawn different tokens: are their GPUs alike?")
        self.agreed = number or None

    def __enter__(self) -> "StopSignals":
        """Install the handlers of SIGTERM and SIGINT."""
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        """Restore the handlers from before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame) -> None:
        if self.asked and self.insist:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if not self.asked:
            print(f"\n{signal.Signals(number).name}: {self.then}", file=sys.stderr)
            self.number = number


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` for SIGTERM, unless somebody handles it already."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    raised = False

    def terminate(number: int, frame) -> None:
        nonlocal raised
        raised = True
        raise Terminated

    hook = sys.unraisablehook
    if ours:
        signal.signal(signal.SIGTERM, terminate)
        sys.unraisablehook = functools.partial(_send_again, hook)
    try:
        yield
    except Exception as error:
        # An interrupted import fails with any error, at once or where its module is used.
        if raised and not (isinstance(error, ValueError | OSError) and _of_termination(error)):
            raise Terminated from None
        raise
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.unraisablehook = hook


def _send_again(hook: Callable, unraisable) -> None:
    """Send a signal again whose exception was raised in a callback, such as those of imports, and would be lost."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        hook(unraisable)
        return
    number = signal.SIGTERM if isinstance(unraisable.exc_value, Terminated) else signal.SIGINT
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()


def _of_termination(error: BaseException | None) -> bool:
    """Return whether an error was raised while `Terminated` was handled, as when a file cannot be saved."""
    while error is not None and not isinstance(error, Terminated):
        error = error.__context__
    return error is not None


def one_sentence_errors(main: Callable) -> Callable:
    """Wrap `main` so that a user's mistake prints one sentence and exits with code 2.

    - A ValueError is printed as "error: ...". So are errors of the system: an unreadable file, a full disk, no memory.
    - So is any error that the user's own code has raised (`specdec.own`).
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
            _unexpected(error)
        except Exception as error:
            _unexpected(error)

    return wrapped


def _unexpected(error: Exception) -> NoReturn:
    """Report an error in the user's own code in one sentence. Raise any other."""
    if place := place_of(error):
        fail(f"error: {place}: {type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}")
    _speak()
    raise error


def fail(message: str, code: int = 2) -> NoReturn:
    """Print a message and exit, with code 2 for a user's mistake. Of several processes only the first one prints."""
    _speak()
    if first_to_end():
        with suppress(OSError):
            print(message, file=sys.stderr)
    silence()
    if any(isinstance(thread, Call) for thread in threading.enumerate()):
        os._exit(code)  # the interpreter's clean-up would abort the process in torch's code, which the thread runs
    sys.exit(code)


def _speak() -> None:
    """Restore the standard error of a process that `ranks.silence` has silenced."""
    if world() > 1 and sys.__stderr__ is not None:
        sys.stderr = sys.__stderr__


def open_streams() -> None:
    """Open the null device for each closed standard stream, whose number the next opened file would get.

    Standard output escapes the characters that its encoding lacks, as standard error does.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (to the end of the process)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def silence() -> None:
    """Drop the buffered output that can no longer be written, which Python would report at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
