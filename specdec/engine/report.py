"""The report of an engine step, from the device to its readers, and the fields that observers read."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from torch import Tensor
from typing_extensions import override

from specdec.engine.adaptive import Draft
from specdec.engine.backlog import Positions
from specdec.engine.sequence import Sequence
from specdec.structs import DraftTree, Sampling, SamplingBatch

GREEDY = Sampling()


class Reads(IntEnum):
    """Fields of a report that an observer reads. Each level includes those above it.

    Fields that no observer reads are not copied out of a replayed round (docs/graphs.md).
    """

    TOKENS = 0  # rows, emitted tokens, counts and the clock: the host reads these in any case
    TREES = 1  # tree, without its `q`, and verifier output
    LOGITS = 2  # logits, and the tree's `q`


@dataclass
class Emission:
    """What a round emits: tensors on the device, and lists once the host has read them."""

    tokens: Any  # [B,P] emitted tokens, as in `Verdict`
    counts: Any  # [B] how many of them
    levels: Any = None  # [B] number of levels of the tree that count for each row; None: all of them
    logprobs: Any = None  # [B,P] if requested
    likely: Any = None  # [B,P,k] the most likely tokens in the place of each, best first, if requested
    likely_logprobs: Any = None  # [B,P,k] their log-probabilities

    def present(self) -> dict[str, Any]:
        """Return the fields that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class Plan:
    """The choice of an adaptive policy for a round."""

    levels: int
    rows: abc.Sequence[int] = ()  # rows that the policy learns from
    draft: Draft | None = None  # as it is verified; None if the policy does not look at drafts


@dataclass
class RoundReport:
    """The record of a step: of a prefill, or of a round. Row i of everything in it is the sequence `rows[i]`.

    A round makes the record with tensors on the device. The loop adds what the rows emitted when it has read it.
    Tensors belong to the engine again when the observer returns. tree, verdict and logits are None for a prefill, for
    plain decoding, where the drafter had nothing to propose for any row, and for an observer that does not read them.
    """

    # Of the step
    rows: list[Sequence] = field(default_factory=list)  # as they are now; some may have ended before
    sampling: Sampling | SamplingBatch = GREEDY
    clock: Any = None  # a `Clock`
    prefill: bool = False  # the rows have just joined, and emitted their first token
    captured: bool = False  # a round was captured or compiled in this step, which took its time
    # Once the round was read
    emitted: list[list[int]] = field(default_factory=list)  # tokens that were added to the rows
    accepted: list[int] = field(default_factory=list)  # how many of them were drafted
    levels: list[int] | None = None  # of the tree, by row: nodes after these levels are void; None: all levels count
    logprobs: list[list[float]] | None = None  # of emitted tokens, before any cut; None if not requested
    # On the device
    emission: Any = None  # an `Emission`; None for a prefill
    tree: DraftTree | None = None
    verdict: Any = None  # a `Verdict`, where there is a tree
    nodes: int = 1  # of the trees that were verified, the root included
    experts: abc.Sequence[Tensor] = ()  # by layer, which ones the nodes of all rows chose; empty for a dense target
    logits: Any = None  # [B,N,V] of the target at the tree's nodes, after penalties and masks
    # For an adaptive policy
    plan: Any = None  # a `Plan`
    parents: Any = None  # [B,N] of the tree
    path: Any = None  # [B,P] of the verifier output
    deferred: Positions | None = None  # of a plain round: for the drafter to absorb later
    eager: bool = False  # played eagerly instead of replayed, as the captured round is not ready yet

    def only(self, reads: Reads) -> "RoundReport":
        """Return a copy without the fields that no observer reads."""
        if self.tree is None or reads >= Reads.LOGITS:
            return self
        if reads < Reads.TREES:
            return replace(self, tree=None, verdict=None, logits=None, experts=())
        return replace(self, tree=replace(self.tree, q=None), logits=None, experts=())


class Observer:
    """Called with the report of every step of `Engine.generate`. A plain function works too, and reads everything."""

    reads: Reads = Reads.LOGITS

    def __call__(self, report: RoundReport) -> None:
        """Receive the report of a step."""
        raise NotImplementedError


def reads_of(observer: Observer | Callable[[RoundReport], None] | None) -> Reads:
    """Return what an observer reads; None is no observer."""
    if observer is None:
        return Reads.TOKENS
    return observer.reads if isinstance(observer, Observer) else Reads.LOGITS


class Observers(Observer):
    """Several observers, called one after the other."""

    def __init__(self, *observers: Observer):
        """Combine observers; together they read whatever one of them reads."""
        self.observers, self.reads = observers, max(observer.reads for observer in observers)

    @override
    def __call__(self, report: RoundReport) -> None:
        for observer in self.observers:
            observer(report)
