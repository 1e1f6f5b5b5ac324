"""What captured rounds need (docs/graphs.md). Without an executor a batch runs the Python of every round."""

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from torch import Tensor

from specdec.engine.report import RoundReport
from specdec.engine.round import Round

STEP = 256  # slots: the smallest bucket, and what the room of caches is a multiple of


class Executor(Protocol):
    """Captures and replays functions of static tensors: what a round reads and writes must not move."""

    any_bound: bool  # a captured round serves all bounds and returns new tensors; else one bound and the same tensors
    late: bool  # a replay may still be running on the device when it returns

    def forget(self) -> None:
        """Release what is shared by all captured rounds, none of which will be replayed again."""

    def capture(self, run: Callable[[int], Any], preserved: abc.Sequence[Tensor], bound: int) -> Callable[[int], Any]:
        """Return a function that does and returns what `run` does, for this bound of the committed length.

        With `any_bound` the function takes any bound up to this one. preserved: all tensors that `run` changes and that
        outlive it; a capture leaves them as they are.
        """


@contextmanager
def restored(preserved: abc.Sequence[Tensor]) -> Iterator[None]:
    """Undo at the end what changed in these tensors. A capture runs a round a few times first."""
    before = [x.clone() for x in preserved]
    try:
        yield
    finally:
        for x, old in zip(preserved, before, strict=True):
            x.copy_(old)


@dataclass
class Graph:
    """A captured round. It has the addresses of what it reads, so these tensors must live as long as it does."""

    replay: Callable[[int], RoundReport]
    bindings: list  # what it reads other than the tensors of the batch and parameters
    eager: bool = False  # the last round was played eagerly instead


def buckets(room: int) -> list[int]:
    """Return the bounds of the committed length that rounds are captured for: STEP, doubled repeatedly, and `room`."""
    sizes = [STEP]
    while sizes[-1] < room:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], room]


def bindings_of(round_: Round) -> list:
    """Return what rounds read that does not belong to a batch.

    The next cache or `reset` freezes modules again, and a longer cache lets position tables grow.
    """
    modules = [m for part in (round_.target, round_.drafter) if part is not None for m in part.modules()]
    frozen = [vars(m).get(name) for m in modules for name in ("parts", "frozen", "adds")]
    buffers = [x for m in modules for x in m.buffers(recurse=False)]
    return [frozen, buffers, round_.policy and dict(vars(round_.policy))]


def copied(report: RoundReport) -> RoundReport:
    """Return the record of a replayed round with copies of what is read later: the next replay overwrites it."""
    later = ("tree", "verdict", "logits", "parents", "path", "deferred")
    return replace(report, **{name: copy_of(x) for name in later if (x := vars(report)[name]) is not None})


def copy_of(value: Any) -> Any:
    """Return a tensor, or a dataclass of tensors, with copies of the tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    parts = {f.name: x.clone() for f in fields(value) if isinstance(x := vars(value)[f.name], Tensor)}
    return replace(value, **parts)
