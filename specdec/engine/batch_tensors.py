"""What rounds read and write of a batch's rows. For captured rounds these tensors never move (docs/graphs.md)."""

from collections import abc
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.contracts import DraftState
from specdec.engine.report import Clock, SilentClock
from specdec.engine.round import Round, RoundSettings
from specdec.engine.sequence import MOST_LIKELY, Masks, Sequence
from specdec.model.cache import KVCache
from specdec.sampling.filters import settings_of
from specdec.sampling.noise import Noise
from specdec.sampling.penalties import Penalties
from specdec.structs import Sampling, SamplingBatch, Survivors


class BatchTensors:
    """Caches, roots, drafter's state, progress and settings of the first W of R rows.

    With `fixed` all of them are views of tensors of R rows, which stay where they are. Otherwise roots and state are
    what the last round returned, and the drafter looks after its own cache.
    """

    def __init__(self, round_: Round, rows: int, room: int, fixed: bool):
        """Make room for `rows` rows of up to `room` tokens."""
        target, self.rows, self.fixed = round_.target, rows, fixed
        self.drafter: Any = round_.drafter  # a `Drafter`, or None
        self.device = device = target.device
        self.cache = target.new_cache(rows, round_.target_slots(room))
        self.draft_cache: KVCache | None = None
        self.draft_slots = round_.draft_slots(room)
        if self.drafter is not None:
            self.drafter.reset(rows, self.draft_slots)
            self.draft_cache = self.drafter.cache if fixed else None
        if self.draft_cache is not None:
            self.draft_cache.captured = True
        self.all_roots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.all_active = torch.zeros(rows, dtype=torch.bool, device=device)
        self.all_left = torch.zeros(rows, dtype=torch.int64, device=device)
        self.all_states: DraftState | None = None
        self.kinds: dict[tuple, RoundSettings] = {}  # by `kind`: settings whose tensors captured rounds read
        self.kind: tuple = ()
        self.settings: Any = None  # `RoundSettings` that rounds are played with, once rows have joined
        self.root: Any = None  # [W]
        self.state: Any = None  # a `DraftState`, where there is a drafter
        self.clear()

    def clear(self) -> None:
        """Use no row, and empty the caches."""
        self.cache.clear(0)
        if self.draft_cache is not None:  # another engine may have let the drafter make one of its own
            self.drafter.cache = self.draft_cache.clear(0)
        self.use(0)

    def use(self, rows: int) -> None:
        """Work on the first `rows` rows."""
        self.active = self.all_active[:rows]  # [W] which rows still decode
        self.left = self.all_left[:rows]  # [W] how many tokens each row may still add
        if self.fixed:
            self.cache.use(0, rows)
            if self.draft_cache is not None:
                self.draft_cache.use(0, rows)
            self.root = self.all_roots[:rows]
            if self.all_states is not None:
                self.state = self.all_states.rows(slice(rows))

    # Rows

    def store(self, root: Tensor, state: DraftState | None) -> None:
        """Store what a round leaves to the next one."""
        if not self.fixed:
            self.root, self.state = root, state
            return
        if root is not self.root:
            self.root.copy_(root)
        if state is not None and state is not self.state:
            for old, new in zip(self.state.tensors(), state.tensors(), strict=True):
                old.copy_(new)

    def join(self, root: Tensor, state: DraftState | None) -> None:
        """Append rows to those in use."""
        if len(self.active):
            root = torch.cat([self.root, root])
            state = state if state is None else self.state.joined(state)
        if self.fixed and state is not None:
            self.all_states = self.all_states or state.blank(self.rows)
            self.all_states.head = state.head
        self.use(len(root))
        self.store(root, state)

    def compact(self, survivors: Survivors) -> None:
        """Drop all rows except these."""
        self.cache.compact(survivors)
        if self.state is not None:
            self.drafter.compact(survivors)
        index = survivors.index
        root, state = self.root[index], self.state and self.state.rows(index)
        active, left = self.active[index], self.left[index]
        self.all_active.fill_(False)
        self.use(len(index))
        self.active.copy_(active)
        self.left.copy_(left)
        self.store(root, state)

    def undo_prefill(self, rows: int) -> None:
        """Remove all rows but the first `rows` from the caches."""
        survivors = Survivors([False] * rows, self.device)
        self.cache.compact(survivors)
        if self.state is not None:
            self.drafter.compact(survivors)
        elif self.drafter is not None and not self.fixed:
            self.drafter.reset(self.rows, self.draft_slots)

    def bound(self, length: int) -> None:
        """Set a bound: no row that decodes has committed more than `length` tokens."""
        self.cache.max_len = length
        if self.draft_cache is not None:
            self.draft_cache.max_len = length + 1  # that of a draft model holds token 0 too

    # Progress

    def refresh(self, sequences: abc.Sequence[Sequence]) -> None:
        """Take from the host which rows decode, and for how many tokens."""
        self.active.copy_(self._column([s.finish is None for s in sequences]))
        self.left.copy_(self._column([s.left for s in sequences]))

    def stop(self, sequences: abc.Sequence[Sequence]) -> None:
        """Stop the rows that the host knows to have ended. The device may not know it."""
        self.active &= self._column([s.finish is None for s in sequences])

    def settle(self, eos: Tensor, tokens: Tensor, n: Tensor) -> None:
        """Update `active` and `left` in place, by the rule of `Sequence.add`, for the first n [W] of tokens [W,P]."""
        emitted = torch.where(self.active, n.minimum(self.left), 0)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        ends = (tokens[..., None] == eos[:, None]).any(-1) & (place < emitted[:, None])
        self.left -= emitted
        self.active &= ~ends.any(1) & (self.left > 0)

    def _column(self, values: list) -> Tensor:
        return torch.tensor(values, device=self.device)

    # Settings

    def take(self, settings: RoundSettings) -> None:
        """Take the settings of all rows."""
        if not self.fixed:
            self.settings = settings
            return
        sampling: Any = settings.sampling  # the part that decides which operators run: of a table the filters
        sampling = sampling.program if isinstance(sampling, SamplingBatch) else sampling
        given = settings.penalties is not None, settings.logprobs, settings.likely, settings.steps is not None
        self.kind = *settings.eos.shape, sampling, *given
        self.settings = self.kinds.setdefault(self.kind, replace(settings, clock=SilentClock()))
        self.settings.masks = settings.masks
        for name in ("sampling", "penalties", "noise", "steps", "eos"):
            _refill(getattr(self.settings, name), getattr(settings, name))

    def forget_settings(self, kinds: set[tuple]) -> None:
        """Drop settings that are not in use, except these kinds, which captured rounds read."""
        self.kinds = {kind: settings for kind, settings in self.kinds.items() if kind in kinds or kind == self.kind}

    def changing(self) -> list[Tensor]:
        """Return the tensors that a round changes and the next one reads."""
        states = self.state.tensors() if self.state else []
        counts = [self.settings.penalties.counts] if self.settings.penalties else []
        lens = [cache.lens for cache in (self.cache, self.draft_cache) if cache is not None]
        return [self.root, self.active, self.left, *lens, *states, *counts]


def _refill(old: Any, new: Any) -> None:
    """Copy a tensor, or the tensors of an object such as `Penalties`, into another one of the same kind."""
    if old is new:
        return
    if isinstance(old, Tensor):
        old.copy_(new)
        return
    for name, value in vars(new).items():
        if isinstance(value, Tensor):
            vars(old)[name].copy_(value)


def settings_for(
    round_: Round, sequences: abc.Sequence[Sequence], clock: Clock | SilentClock, table: bool
) -> RoundSettings:
    """Return the settings of rounds with these rows, whose texts are as the host knows them.

    table: the sampling of rows that draw is a table, also if all rows have the same.
    """
    device, penalties, steps, width = round_.target.device, None, None, len(round_.target.eos)
    samplings, most = [s.sampling for s in sequences], round_.path - 1
    if any(sampling.penalised for sampling in samplings):
        penalties = Penalties(sequences, round_.target.config.vocab, device)
    if most and any(s.steps is not None for s in sequences):
        steps = torch.tensor([most if s.steps is None else min(s.steps, most) for s in sequences], device=device)
    if table:
        sampling = Sampling() if all(s.greedy for s in samplings) else SamplingBatch(samplings, device)
    else:
        sampling = settings_of(samplings, device)
    width = max(width, *(len(s.eos) for s in sequences))
    eos = [sorted(s.eos) + [-1] * (width - len(s.eos)) for s in sequences]
    return RoundSettings(
        sampling=sampling,
        noise=Noise([s.seed for s in sequences], round_.hashes),
        clock=clock,
        eos=torch.tensor(eos, dtype=torch.int64, device=device).view(len(sequences), width),
        penalties=penalties,
        masks=Masks(sequences) or None,
        logprobs=any(s.logprobs is not None for s in sequences),
        likely=min(MOST_LIKELY, round_.target.vocab) if any(s.top for s in sequences) else 0,
        steps=steps,
    )
