"""The rows that rounds compute: what has ended is dropped, and costs nothing but its place in the result.

To drop rows is to move together what is kept of the others, which takes a part of a round. Whether that pays nobody
knows, because nobody knows when the others end. So it is with packets that may be acknowledged together, but late, and
the answer is the same (Dooly, Goldman and Scott, "TCP dynamic acknowledgment delay", STOC 1998): carry ended rows until
that would cost as much as to drop them, which costs at most about twice as much as the best choice in hindsight.

The rule counts rounds and not seconds, so a run can be repeated, and it knows of a row's end what late reading knows
(`late.read_late`), so both loops drop the same rows before the same rounds, and draw the same numbers for the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.contracts import DraftState
from specdec.engine.sequence import Row
from specdec.model.cache import KVCache
from specdec.sampling.filters import settings_of
from specdec.types import DraftTree, Sampling, SamplingBatch, Verdict

PRICE = 0.25  # of dropping rows, in rounds: up to 0.4 of plain ones, 0.02 to 0.12 of those of trees (docs/log.md)


@dataclass
class RoundOutput:
    """What a round made on the device. tree, verdict and logits are None if it drafted nothing, or nobody looks."""

    tokens: Tensor  # [B,P] emitted tokens, as in `Verdict`
    n: Tensor  # [B] how many of them
    logprobs: Tensor | None = None  # [B,P] if asked for
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    logits: Tensor | None = None  # [B,N,V]
    places: list[int] | None = None  # [B] which rows of the call these are, ascending; None: all
    sampling: Sampling | SamplingBatch | None = None  # of these rows; None: that of the call

    def read(self) -> list[Tensor]:
        """What the host wants to know."""
        return [self.tokens, self.n] if self.logprobs is None else [self.tokens, self.n, self.logprobs]

    def outcome(self) -> "Outcome":
        """Read at once, which waits for the device."""
        return Outcome(self, *(x.tolist() for x in self.read()))


@dataclass
class Outcome:
    """A round as the host has read it: `Made.read` in lists."""

    made: RoundOutput
    tokens: list[list[int]]
    counts: list[int]
    logprobs: list[list[float]] | None = None


def play(
    engine, root: Tensor, state: DraftState | None, cache: KVCache, active: Tensor, how: tuple, **plain
) -> tuple[Tensor, DraftState | None, RoundOutput]:
    """A round of an `engine.Engine` of which the rows `active` [B] go on: the next root and state, and what it made.

    how: the arguments of `Engine.round` from `sampling` on; plain: further ones of `Engine.plain_round`.
    """
    if engine.drafter is None:
        root, logprobs = engine.plain_round(root, cache, active, *how, **plain)
        return (
            root,
            None,
            RoundOutput(root[:, None], torch.ones_like(root), None if logprobs is None else logprobs[:, None]),
        )
    root, state, tree, verdict, logits = engine.round(root, state, cache, active, *how)
    return root, state, RoundOutput(verdict.tokens, verdict.n, verdict.logprobs, tree, verdict, logits)


class Live:
    """What rounds work on: some rows of a call, and what one round leaves to the next."""

    def __init__(self, engine, rows: Sequence[Row], root: Tensor, state: DraftState | None, cache: KVCache, how: tuple):
        """rows: of the call, all of which the tensors hold; how: the arguments of `Engine.round` from `sampling` on."""
        self.engine, self.rows = engine, rows
        self.root, self.state, self.cache, self.how = root, state, cache, how
        self.places = list(range(len(rows)))  # [B] which rows of the call there are, ascending
        self.carried = 0.0  # what ended rows have cost, in rounds, since any were dropped; the next round included
        self.compact = engine.compact and (engine.drafter is None or True)

    def ended(self) -> list[bool]:
        """Of all rows of the call, as far as the host knows."""
        return [row.finish is not None for row in self.rows]

    def shed(self, ended: Sequence[bool]) -> Tensor | None:
        """Before a round, knowing which rows of the call have ended: drop those if they have been carried for long
        enough. Returns where the others stood [B'], or None if nothing was dropped."""
        kept = [i for i, place in enumerate(self.places) if not ended[place]]
        if not self.compact or len(kept) == len(self.places):
            return None
        self.carried += 1 - len(kept) / len(self.places)
        if self.carried < PRICE:
            return None
        self.carried = 0.0
        self.places = [self.places[i] for i in kept]
        index = torch.tensor(kept, device=self.root.device)
        self._keep(index)
        return index

    def play(self, active: Tensor) -> RoundOutput:
        """The next round, in which the rows `active` [B] go on."""
        self.root, self.state, made = play(self.engine, self.root, self.state, self.cache, active, self.how)
        made.places, made.sampling = self.places, self.how[0]
        return made

    def _keep(self, index: Tensor) -> None:
        sampling, generator, clock, penalties, logprobs = self.how
        sampling = settings_of([self.rows[place].sampling for place in self.places], index.device)
        self.how = sampling, generator, clock, penalties, logprobs
        if penalties is not None:
            penalties.compact(index)
        self.root = self.root[index]
        self.cache.compact(index)
        if self.state is not None:
            self.state = self.state.compact(index)
            self.engine.drafter.compact(index)
