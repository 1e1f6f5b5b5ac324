"""Rows of a batch in tensors that never move, whatever number of them is in use (docs/graphs.md)."""

from collections import abc
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.contracts import DraftState
from specdec.engine.adaptive import Policy
from specdec.engine.batch import Batch, Progress, eos_of
from specdec.engine.clock import Clock, SilentClock
from specdec.engine.guide import Guide
from specdec.engine.round import Round, RoundOutput, RoundSettings
from specdec.engine.sequence import MOST_LIKELY, Masks, Sequence
from specdec.model.cache import KVCache
from specdec.structs import Sampling, SamplingBatch, Survivors

VACANT = "vacant"


class StaticRows(Batch):
    """A batch of which the first W rows are in use, where W is one of `widths`: the least that holds all that decode.

    Rows of sequences that have ended are carried along until a smaller width holds the others, or are taken by those
    that join. All tensors of rows are views of the first W of those for all R rows."""

    def __init__(self, round_: Round, widths: abc.Sequence[int], room: int, clock: Clock):
        """widths: ascending; the last is R."""
        rows = widths[-1]
        super().__init__(round_, rows, room, clock, overlap=True, compact=False)
        self.widths, self.crowd = [*widths], False
        self.draft_cache: KVCache | None = round_.drafter and round_.drafter.cache
        self.all_made = made_of(rows, round_.path, min(MOST_LIKELY, round_.target.vocab), self.device)
        self.all_roots = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.progress = Progress(vacant(rows), self.device)
        self.all_active, self.all_left = self.progress.active, self.progress.left
        self.all_states: DraftState | None = None
        self.all_eos: dict[int, Tensor] = {}  # by their number, [R,E]
        self.masks: Masks | None = None
        self.kinds: dict[tuple, RoundSettings] = {}  # what rounds are played with: tensors that graphs read

    def begin(self, clock: Clock, adaptive: Policy | None = None, crowd: bool = False) -> None:
        """Forget all sequences. adaptive: chooses how many levels are drafted; a policy that does not cut. crowd:
        sequences will come and go."""
        self.clock, self.crowd, width = clock, crowd, self.widths[0]
        self.guide = Guide(adaptive, self.round.drafter) if adaptive is not None else None
        self.cache.clear(width)
        if self.draft_cache is not None:  # another engine may have let the drafter make one of its own
            self.round.drafter.cache = self.draft_cache.clear(width)
        self._use(vacant(width))

    def _use(self, sequences: list[Sequence]) -> None:
        """Have the first rows in use, one for each of these."""
        self.sequences, width = sequences, len(sequences)
        for cache in (self.cache, self.draft_cache):
            if cache is not None:
                cache.resize(width)
        self.root = self.all_roots[:width]
        self.progress.active, self.progress.left = self.all_active[:width], self.all_left[:width]
        if self.all_states is not None:
            hidden, readout = self.all_states.hidden[:width], self.all_states.readout[:width]
            self.state = DraftState(hidden, readout, self.all_states.head)

    def _width(self, rows: int) -> int:
        """The least width that holds so many."""
        return next(width for width in self.widths if width >= rows)

    def admit(self, sequences: list[Sequence]) -> None:
        width = self._width(len(self.going()) + len(sequences))
        self._narrow([s.finish is not None for s in self.sequences], width)
        before = self.sequences
        self._use(before + vacant(width - len(before)))
        try:
            settings = self._join(sequences)
        except BaseException:
            self._use(before)
            raise
        self._refresh(settings or self._settings(self.sequences))
        self.clock.mark("prefill")

    def _join(self, sequences: list[Sequence]) -> RoundSettings | None:
        """Let them take free rows. Returns the settings of all rows, if they take all at once."""
        free = [b for b, s in enumerate(self.sequences) if s.finish is not None][: len(sequences)]
        for row, count in runs(free):
            joining, sequences = sequences[:count], sequences[count:]
            root, state, settings = self._prefill(joining, row)
            self.sequences[row : row + count] = joining
            self.root[row : row + count] = root
            if state is not None:
                self._place(state, slice(row, row + count))
            if self.guide is not None:
                self.guide.joined(row, count)
        return settings if count == len(self.sequences) else None

    def rest(self) -> None:
        """Hold no sequence. The rows stay where graphs read them."""
        self.all_active.fill_(False)
        self._use(vacant(self.widths[0]))
        if self.guide is not None:
            self.guide.forget()

    def _place(self, state: DraftState, rows: slice) -> None:
        if self.all_states is None:
            self.all_states = state.blank(self.rows)
            self._use(self.sequences)
        self.state.head = self.all_states.head = state.head
        self.state.hidden[rows], self.state.readout[rows] = state.hidden, state.readout

    def _shed(self, ended: abc.Collection[Sequence]) -> None:
        """Leave out rows that have ended, if a smaller width holds the others."""
        over = [s in ended or s.finish == VACANT for s in self.sequences]
        self._narrow(over, self._width(max(len(over) - sum(over), 1)))

    def _narrow(self, over: list[bool], width: int) -> None:
        """Go on with so many rows, among them those that are not over, if there are more."""
        if width >= len(over):
            return
        kept, penalties = Survivors(over, self.device), self.settings.penalties
        here, counts = slice(kept.count), penalties and penalties.counts[kept.index]
        states = [self.state.hidden, self.state.readout] if self.state else []
        for x in (self.root, self.progress.active, self.progress.left, *states):
            x[here] = x[kept.index]
        self.all_active[kept.count :] = False
        for cache in (self.cache, self.draft_cache):
            if cache is not None:
                cache.compact(kept)
        if self.guide is not None:
            self.guide.compact(kept)
        self._use(kept.of(self.sequences) + vacant(width - kept.count))
        self._take(self._settings(self.sequences))
        if counts is not None and self.settings.penalties is not None:  # of rounds too that the host has not read
            self.settings.penalties.counts[here] = counts

    def _sampling(self, sequences: abc.Sequence[Sequence]) -> Sampling | SamplingBatch:
        """Where sequences come and go there are two programs at least, and not one for each temperature."""
        if not self.crowd:
            return super()._sampling(sequences)
        samplings = [s.sampling for s in sequences]
        return Sampling() if all(own.greedy for own in samplings) else SamplingBatch(samplings, self.device)

    def _refresh(self, settings: RoundSettings) -> None:
        """Copy the settings of all rows, and what else follows from the sequences, into the tensors that graphs
        read."""
        progress = Progress(self.sequences, self.device)
        self.progress.active.copy_(progress.active)
        self.progress.left.copy_(progress.left)
        self._take(settings)

    def _take(self, settings: RoundSettings) -> None:
        """Copy the settings of all rows into the tensors that graphs read."""
        eos = eos_of(self.sequences, self.device)
        width, number = len(eos), max(eos.shape[1], len(self.round.target.eos))  # who goes on behind them has none
        if number not in self.all_eos:
            self.all_eos[number] = eos.new_full((self.rows, number), -1)
        self.progress.eos = self.all_eos[number][:width]
        self.progress.eos.fill_(-1)
        self.progress.eos[:, : eos.shape[1]] = eos
        self.kind = (
            width, _kind(settings.sampling), settings.penalties is not None, settings.logprobs, settings.likely,
            settings.steps is not None,
        )  # fmt: skip
        if self.kind not in self.kinds:
            self.kinds[self.kind] = replace(settings, clock=SilentClock(), masks=None)
        else:
            kept = self.kinds[self.kind]
            _refill(kept.sampling, settings.sampling)
            _refill(kept.penalties, settings.penalties)
            _refill(kept.noise, settings.noise)
            if settings.steps is not None:
                kept.steps.copy_(settings.steps)
        self.settings, self.masks = self.kinds[self.kind], settings.masks


def vacant(rows: int) -> list[Sequence]:
    """What rows hold that no sequence has taken."""
    return [Sequence([0], 1, finish=VACANT) for _ in range(rows)]


def made_of(rows: int, path: int, likely: int, device: torch.device) -> RoundOutput:
    """Places for what a round emits."""
    tokens, logprobs = torch.zeros(rows, path, dtype=torch.int64, device=device), torch.zeros(rows, path, device=device)
    own = tokens.new_zeros(rows, path, likely), logprobs.new_zeros(rows, path, likely)
    return RoundOutput(tokens, tokens.new_zeros(rows), logprobs, *own)


def runs(places: abc.Sequence[int]) -> list[tuple[int, int]]:
    """Ascending places as (first, count) of those that follow each other."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and sum(found[-1]) == place:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((place, 1))
    return found


def _kind(sampling) -> Any:
    """What of a sampling is part of the program: a `Sampling`, and of `SamplingBatch` which filters it has."""
    return sampling.program if isinstance(sampling, SamplingBatch) else sampling


def _refill(kept: Any, new: Any) -> None:
    """Copy the tensors of an object, such as `Penalties`, into those of another of its kind; None has none."""
    for name, value in vars(new).items() if new is not None else ():
        if isinstance(value, Tensor):
            vars(kept)[name].copy_(value)
