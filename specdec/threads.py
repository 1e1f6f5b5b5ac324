"""CPU threads next to other programs: idle OpenMP workers spin briefly, and busy cores get no thread.

An OpenMP worker spins at the end of each operator until its partners have finished. A partner that the scheduler has
paused takes milliseconds, and the worker burns them. A short spin bridges the gaps inside a round and wastes little.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

Made = TypeVar("Made")
SPIN = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "1"}  # libgomp: 0.4 to 2 ms; libiomp: 1 ms, its unit
SERVER_SPIN = SPIN | {"GOMP_SPINCOUNT": "300000"}  # libgomp's own: a server's rounds wait for its event loop
STAT, TASKS = "/proc/stat", "/proc/self/task"
EVERY, SOON = 0.2, 0.05  # seconds between two looks at the load, and before the second one of a decoding
BUSY = 0.6  # share of a core that a program must occupy to take it from us; the clients of a server occupy less
LOOK, AGAIN = 0.5, 10.0  # seconds between two looks of `TimeLimit`, and between two exceptions for one thread
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # units of /proc/stat per second


def limit_spinning(spin: Mapping[str, str] = SPIN) -> None:
    """Set the spin of OpenMP workers, before torch loads OpenMP. The user's own settings take precedence."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        for name, value in spin.items():
            if os.environ.get(name, SPIN[name]) == SPIN[name]:  # unset, or set by an earlier call
                os.environ[name] = value


def full_threads() -> int:
    """Return the number of threads on an idle machine: torch's, or what it was before `Threads` reduced it."""
    import torch

    return Threads.usual or torch.get_num_threads()


class Call(threading.Thread, Generic[Made]):
    """A function call in a daemon thread of its own, which has begun. The program may exit while it runs."""

    def __init__(self, function: Callable[..., Made], *args) -> None:
        """Start the call."""
        super().__init__(daemon=True)
        self.future = Future[Made]()
        self.call = lambda: function(*args)
        self.start()

    def run(self) -> None:
        """Run the function, and store its result or its error in `future`."""
        try:
            self.future.set_result(self.call())
        except BaseException as error:
            self.future.set_exception(error)


class _TimeIsUp(BaseException):
    """Raised in a thread from outside. Code that catches every `Exception` lets it pass."""


class TimeLimit:
    """Ends Python code that runs too long, in whatever thread. One thread watches all of it.

    A thread for each piece of code would wait for the interpreter's lock twice, next to a busy engine for milliseconds.
    """

    def __init__(self) -> None:
        """Begin without a watching thread, as a forked process also does."""
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.lock = threading.Lock()
        self.watch: threading.Thread | None = None
        self.running: dict[int, float] = {}  # thread -> when its time is up

    def run(self, seconds: float, function: Callable[..., Made], *args, **how) -> Made:
        """Return `function(*args, **how)`. Raises TimeoutError after `seconds`; a call of C code first returns."""
        thread = threading.get_ident()
        try:
            try:
                with self.lock:
                    self.running[thread] = time.monotonic() + seconds
                    if self.watch is None:
                        self.watch = threading.Thread(target=self._watch, daemon=True)
                        self.watch.start()
                return function(*args, **how)
            finally:
                self._end(thread)
        except _TimeIsUp:
            self._end(thread)  # it may have come before the first call had begun
            raise TimeoutError from None

    def _end(self, thread: int) -> None:
        while True:
            try:
                with self.lock:
                    self.running.pop(thread, None)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)  # one not raised yet
                return
            except _TimeIsUp:  # it came when the function had just ended
                pass

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK)
            with self.lock:
                late = [thread for thread, end in self.running.items() if end < time.monotonic()]
                for thread in late:  # again later, if C code has dropped the exception
                    self.running[thread] = time.monotonic() + AGAIN
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TimeIsUp))


class Threads:
    """Reduces torch's threads by the number of cores that other programs of normal priority occupy.

    Results depend on the number by rounding alone. `OMP_NUM_THREADS` fixes the number.
    Source: the times in /proc/stat of the cores that this process may use. Elsewhere nothing changes.
    """

    usual: int | None = None  # torch's number while ours is smaller
    looked: float = -1.0  # when this process last looked at the load; negative before the first time
    busy, found = 0.0, 0.0  # processor time of other programs until then, and how many cores they occupied

    def __init__(self, on: bool) -> None:
        """Adapt the threads of torch; `on` False leaves their number as it is."""
        self.fixed = not on or "OMP_NUM_THREADS" in os.environ or not os.path.exists(STAT)
        self.cores = {f"cpu{core}" for core in os.sched_getaffinity(0)} if not self.fixed else set()
        self.looks = 0
        if Threads.looked < 0:
            self._look()

    def adapt(self) -> None:
        """Set the number of threads for the next rounds, at most once in `EVERY` seconds. Costs 0.1 to 0.5 ms.

        The first number follows from the load since the process last looked, in an earlier decoding or when it began,
        and is no less than the cores without a running program.
        """
        age = time.monotonic() - Threads.looked
        if self.fixed or (self.looks and age < (SOON if self.looks == 1 else EVERY)):
            return
        if age >= SOON:
            self._look()
        found = Threads.found
        if not self.looks and found >= BUSY:
            found = min(found, self._running())
        self.looks += 1
        most = full_threads()
        self._set(max(1, min(most, len(self.cores) - int(found + 1 - BUSY))), most)

    def _look(self) -> None:
        before = Threads.looked, Threads.busy
        now = Threads.looked, Threads.busy = self.load()
        if before[0] >= 0:
            Threads.found = _cores(before, now)

    def load(self) -> tuple[float, float]:
        """Return the time, and the processor time of other programs of normal priority until now, in seconds."""
        return time.monotonic(), self._others()

    def occupied_since(self, begun: tuple[float, float]) -> float:
        """Return how many cores other programs have occupied since `load` returned `begun`."""
        return _cores(begun, self.load())

    def restore(self) -> None:
        """Set the number of threads that torch had before, until rounds are decoded again."""
        self.looks = 0
        if Threads.usual is not None:
            self._set(Threads.usual, Threads.usual)

    @staticmethod
    def _set(count: int, most: int) -> None:
        import torch

        if count != torch.get_num_threads():
            torch.set_num_threads(count)
        Threads.usual = most if count < most else None

    def _others(self) -> float:
        """Return the processor time in seconds that other processes of normal priority have used on our cores."""
        if self.fixed:
            return 0.0
        with open(STAT, encoding="ascii") as file:
            rows = [line.split() for line in file if line.split()[0] in self.cores]
        niced = os.nice(0) > 0  # then our own time counts as `nice`, and programs of normal priority come first
        ticks = sum(sum(map(int, (row[1], row[3], row[6], row[7], row[8]))) for row in rows)
        return ticks / TICK - (0.0 if niced else time.process_time())

    @staticmethod
    def _running() -> int:
        """Return the number of other programs' threads on this machine that run or wait for a core."""
        with open(STAT, encoding="ascii") as file:
            every = next((int(line.split()[1]) for line in file if line.startswith("procs_running ")), 1 << 16)
        own = 0
        for task in os.listdir(TASKS):
            with suppress(OSError), open(f"{TASKS}/{task}/stat", encoding="utf-8") as file:  # it may have ended
                own += file.read().rpartition(")")[2].split()[0] == "R"
        return every - own


def _cores(begun: tuple[float, float], ended: tuple[float, float]) -> float:
    return (ended[1] - begun[1]) / max(ended[0] - begun[0], 1 / TICK)
