"""The report of an engine step, from the device to its readers, the clock of its parts, and the result of a call."""

import time
from collections import abc, defaultdict
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from specdec.engine.adaptive import Draft
from specdec.engine.sequence import Sequence
from specdec.structs import DraftTree, Sampling, SamplingBatch

GREEDY = Sampling()
MOST = 4096  # marks of a clock stored before they are summed


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
class Positions:
    """Committed positions of R rows, of one prefill or one plain round."""

    feats: Tensor | None  # [R,K,F] of the target; None for a drafter without taps
    tokens: Tensor  # [R,K] one further on
    n: Tensor  # [R] how many of the K count


@dataclass
class Plan:
    """The choice of an adaptive policy for a round."""

    levels: int
    rows: abc.Sequence[int] = ()  # rows that the policy learns from
    others: abc.Sequence[int] = ()  # rows for which fewer levels count: nothing follows from them for the next level
    draft: Draft | None = None  # as it is verified; None if the policy does not look at drafts


@dataclass
class RoundReport:
    """The record of a step: of a prefill, or of a round. Row i of everything in it is the sequence `rows[i]`.

    A round makes it with tensors on the device. The loop adds what the rows emitted. Tensors belong to the engine again
    when the observer returns. tree, verdict and logits are None for a prefill, for plain decoding, where the drafter
    had nothing to propose for any row or a policy cut all of it, and for an observer that does not read them.
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


class Observers(Observer):
    """Several observers, called one after the other."""

    def __init__(self, *observers: Observer):
        """Combine observers; together they read whatever one of them reads."""
        self.observers, self.reads = observers, max(observer.reads for observer in observers)

    @override
    def __call__(self, report: RoundReport) -> None:
        for observer in self.observers:
            observer(report)


class Clock:
    """Time per part of a round, without synchronising: wall clock on the CPU, events on a GPU.

    `position` counts marks from the beginning. Old marks can be added up (`fold`), so that a clock that runs on and on
    does not grow.
    """

    def __init__(self, device: torch.device):
        """Start the clock for work on this device."""
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []  # times, or events of a GPU
        self.folded: dict[str, float] = defaultdict(float)  # seconds by part of the marks that are gone
        self.gone = 0  # how many those are
        self.mark("")

    @property
    def position(self) -> int:
        """Number of marks so far."""
        return self.gone + len(self.marks)

    def mark(self, part: str) -> None:
        """Attribute the time since the last mark to `part`."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def seconds(self, first: int = 0) -> dict[str, float]:
        """Return the seconds of each part from mark `first` on. This waits for the device."""
        total = defaultdict(float, self.folded if first < self.gone else {})
        for part, seconds in self.intervals(first):
            total[part] += seconds
        return dict(total)

    def intervals(self, first: int = 0) -> list[tuple[str, float]]:
        """Return each mark's part and its seconds, in order, from mark `first` on. This waits for the device."""
        if self.cuda:
            self.marks[-1][1].synchronize()  # the others were recorded before it
        return [
            (part, before.elapsed_time(now) / 1e3 if self.cuda else now - before)
            for (_, before), (part, now) in pairwise(self.marks[max(first - self.gone, 0) :])
        ]

    def fold(self) -> None:
        """Replace the marks by their sums once there are many. Then this waits for the device."""
        if len(self.marks) > MOST:
            for part, seconds in self.intervals(self.gone):
                self.folded[part] += seconds
            self.gone += len(self.marks) - 1
            del self.marks[:-1]


class SilentClock:
    """A clock without marks, for captured rounds: a replay does not run a mark."""

    def mark(self, part: str) -> None:
        """Do nothing."""


@dataclass(repr=False)
class Result:
    """Sequences, with times in seconds."""

    rows: list[Sequence]
    seconds: float  # all of it
    prefill_seconds: float  # of preparing, and of the steps that read prompts and emitted the first tokens
    parts: dict[str, float]  # seconds in prefill, draft, verify, commit (or round, if replayed), host, output

    @property
    def decode_seconds(self) -> float:
        """Seconds of the rounds, except for the observer, capturing and compiling."""
        return self.seconds - self.prefill_seconds - sum(self.parts.get(part, 0.0) for part in ("output", "capture"))

    def __repr__(self) -> str:
        """Return counts: a row holds every token."""
        tokens = sum(len(row.tokens) for row in self.rows)
        return f"Result({len(self.rows)} rows, {tokens} tokens in {self.seconds:.2f} s)"
