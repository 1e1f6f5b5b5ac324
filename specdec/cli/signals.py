"""SIGTERM and SIGINT: how a command stops when it gets one."""

import signal
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.ranks import largest


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised as Ctrl-C is, so that the same clean-up code handles both."""


class StopSignals:
    """While open, the first SIGTERM or SIGINT is noted, and the command polls `asked` at safe points.

    Later signals do nothing, because launchers send several; with `insist` the second one is raised.
    """

    def __init__(self, then: str = "finishing the step, then saving", insist: bool = False) -> None:
        """then: what the command does after a signal, for its message. insist: raise the second signal."""
        self.then, self.insist = then, insist
        self.number: int | None = None  # of the first signal

    @property
    def asked(self) -> bool:
        """Whether a signal has asked the command to stop."""
        return self.number is not None

    def meet(self, emitted: list[list[int]]) -> None:
        """Called after each round with its tokens: see `SharedSignals`."""

    @property
    def code(self) -> int:
        """The exit code of a process that a signal has ended, as shells have it: 130 or 143."""
        return 128 + (self.number or 0)

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


class SharedSignals(StopSignals):
    """Signals of one of several processes with the same rounds. All of them stop after the same round."""

    agreed: int | None = None  # the signal that all know of

    @property
    def asked(self) -> bool:
        """Whether all processes have agreed to stop."""
        return self.agreed is not None

    @property
    def code(self) -> int:
        """The exit code of the agreed signal, as shells have it: 130 or 143."""
        return 128 + (self.agreed or 0)

    def meet(self, emitted: list[list[int]]) -> None:
        """Every process must call it. Raises ValueError if not all have the same tokens."""
        state = zlib.crc32(repr(emitted).encode())
        most, least, number = largest([state, -state, self.number or 0])
        if most != -least:
            raise ValueError("the processes that share the target have drawn different tokens: are their GPUs alike?")
        self.agreed = number or None


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` for SIGTERM, unless somebody handles it already."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame) -> None:
    raise Terminated
