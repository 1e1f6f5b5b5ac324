"""Another engine in a process of its own.

Engines bring their own pools of threads, and the threads of an idle pool spin while they wait for work. Side by side in
one process, CTranslate2, llama.cpp and torch made each other 1.5 to 6 times slower (docs/log.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path


@dataclass
class Answer:
    """One decoding. Times are of `time.perf_counter`, which counts alike in all processes of a machine."""

    tokens: list[int]
    marks: list[float]  # when each token came
    start: float
    end: float


class Session:
    """An engine with a model that it has loaded. It lives in the process of the engine."""

    def __init__(self, folder: Path, settings: dict):
        """folder: where the model lies, for as long as this takes. settings: what is needed beside it."""
        raise NotImplementedError

    def __call__(self, request: dict) -> Answer:
        raise NotImplementedError


class PeerProcess:
    """A session in a new process, which ends with this one. What it raises is raised here as a RuntimeError."""

    def __init__(self, session: type[Session], folder: Path, settings: dict):
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, session, folder, settings), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def __call__(self, request: dict) -> Answer:
        self._connection.send(request)
        return self._receive()

    def _receive(self) -> Answer | None:
        try:
            error, answer = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"its process ended with {self._process.exitcode}") from None
        if error is not None:
            raise RuntimeError(error)
        return answer


def _serve(connection: Connection, session: type[Session], folder: Path, settings: dict) -> None:
    """Load, say so, and answer requests until nobody asks any more."""
    ready = _tell(connection, lambda: session(folder, settings), keep=True)
    while ready is not None:
        try:
            request = connection.recv()
        except EOFError:
            return
        _tell(connection, lambda request=request: ready(request))


def _tell(connection: Connection, what: Callable[[], object], keep: bool = False) -> object:
    """Send what it gives, or nothing if that is to be kept here, or the error."""
    try:
        made = what()
    except Exception as error:
        connection.send((f"{type(error).__name__}: {error}", None))
        return None
    connection.send((None, None if keep else made))
    return made
