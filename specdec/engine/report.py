"""What a step of the engine tells, and who is told."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from specdec.engine.clock import Clock
from specdec.engine.sequence import Sequence
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verdict


class Reads(IntEnum):
    """What an observer reads of a report. Each level has what stands above it too. What nobody reads is not copied out
    of a replayed round (docs/graphs.md)."""

    TOKENS = 0  # rows, emitted tokens, counts and the clock: what the host knows in any case
    TREES = 1  # tree, without its `q`, and verdict
    LOGITS = 2  # logits, and the tree's `q`


@dataclass
class RoundReport:
    """What a step did to its rows: a prefill, or a round. Row i of everything in it is the sequence `rows[i]`.

    What the round made on the device is lent: it is the engine's again when the observer returns. tree, verdict and
    logits are None for a prefill, for plain decoding, where the drafter had nothing to propose for any row, and for an
    observer that does not read them."""

    rows: list[Sequence]  # each as it is by now; among them may be some that had ended before
    emitted: list[list[int]]  # what was added to the rows
    accepted: list[int]  # how many of them were drafted
    sampling: Sampling | SamplingBatch
    clock: Clock
    prefill: bool = False  # the rows have just joined, and emitted their first token
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    nodes: int = 1  # of the trees that were verified, the root included
    levels: list[int] | None = None  # of the tree, by row: so many count, the nodes behind them are void; None: all
    logprobs: list[list[float]] | None = None  # of what a round emitted before any cut; None if not asked for
    experts: abc.Sequence[Tensor] = ()  # by layer, which ones the nodes of all rows chose; empty for a dense target
    logits: Tensor | None = None  # [B,N,V] of the target at the tree's nodes, penalties taken off: what was verified
    captured: bool = False  # a round was recorded in this step, which took its time


class Observer:
    """Is told of every step of `Engine.generate`. A plain function does as well, and is taken to read everything."""

    reads: Reads = Reads.LOGITS

    def __call__(self, report: RoundReport) -> None:
        raise NotImplementedError


def reads_of(observer: Observer | Callable[[RoundReport], None] | None) -> Reads:
    """What is to be kept for an observer, or for none."""
    if observer is None:
        return Reads.TOKENS
    return observer.reads if isinstance(observer, Observer) else Reads.LOGITS


class Observers(Observer):
    """Several observers, told one after the other."""

    def __init__(self, *observers: Observer):
        self.observers, self.reads = observers, max(observer.reads for observer in observers)

    def __call__(self, report: RoundReport) -> None:
        for observer in self.observers:
            observer(report)
