"""Committed positions that the drafter has not absorbed yet: plain rounds and prompts leave them for later.

Storing a position copies nothing. Tensors are stored as they came, with the ids of the rows that they belong to.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.contracts import Drafter, DraftState
from specdec.structs import Survivors

ABSORBED = 32  # positions that the drafter absorbs at once
MOST_PARTS = 256  # more parts are merged into one


@dataclass
class Positions:
    """Committed positions of R rows, of one prefill or one plain round."""

    feats: Tensor | None  # [R,K,F] of the target; None for a drafter without taps
    tokens: Tensor  # [R,K] one further on
    n: Tensor  # [R] how many of the K count


@dataclass
class Part:
    """The positions of a prefill, or of consecutive plain rounds with the same rows."""

    ids: list[int]  # of its rows [R]
    rounds: list[Positions]
    open: bool = False  # the next round has the same rows

    def index(self, place_of: dict[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for the rows still in the batch, places in the batch and in this part, and numbers of positions.

        The positions that count come first: once a row has ended, none of its positions counts.
        """
        first, *others = [positions.n for positions in self.rounds]
        counts = sum(others, first)
        here = [row for row, id_ in enumerate(self.ids) if id_ in place_of]
        places = torch.tensor([place_of[self.ids[row]] for row in here], device=counts.device)
        rows = torch.tensor(here, device=counts.device)
        return places, rows, counts[rows]

    def joined(self) -> tuple[Tensor | None, Tensor]:
        """Return the features [R,K,F] and tokens [R,K] of all rounds, concatenated."""
        tokens = torch.cat([positions.tokens for positions in self.rounds], 1)
        feats = [positions.feats for positions in self.rounds if positions.feats is not None]
        return torch.cat(feats, 1) if feats else None, tokens


class Backlog:
    """Committed positions that the drafter has not absorbed.

    Rows have ids that never change, so parts stay as they are when rows leave or move.
    """

    def __init__(self, rows: int):
        """Begin without positions, for a batch of this many rows."""
        self.ids, self.count = list(range(rows)), rows  # ids: of the batch's rows; count: of the ids in use so far
        self.parts: list[Part] = []

    def add(self, positions: Positions) -> None:
        """Store one more position of all rows. It counts for the rows of which n [B] is 1."""
        if not (self.parts and self.parts[-1].open):
            self.parts.append(Part(self.ids, [], open=True))
        self.parts[-1].rounds.append(positions)

    def join(self, rows: int, prompts: Positions | None = None) -> None:
        """Append rows to those of the batch, with the positions of their prompts."""
        self._close()
        new = self._new(rows)
        self.ids = self.ids + new
        if prompts is not None:
            self.parts.append(Part(new, [prompts]))

    def _new(self, rows: int) -> list[int]:
        self.count += rows
        return list(range(self.count - rows, self.count))

    def compact(self, survivors: Survivors) -> None:
        """Drop all rows except these."""
        self._close()
        self.ids = survivors.of(self.ids)
        # A server that never drafts would store the positions of rows that have left for long.
        here = set(self.ids)
        self.parts = [part for part in self.parts if not here.isdisjoint(part.ids)]
        if len(self.parts) > MOST_PARTS:
            self.parts = [Part(self.ids, [self.padded()])]

    def _close(self) -> None:
        if self.parts:
            self.parts[-1].open = False

    def padded(self) -> Positions:
        """Return all positions as those of one round with the batch's rows. This waits for the device."""
        some = self.parts[0].rounds[0]
        n = torch.zeros(len(self.ids), dtype=torch.int64, device=some.tokens.device)
        place_of = {id_: place for place, id_ in enumerate(self.ids)}
        found = [part.index(place_of) for part in self.parts]
        starts = []
        for places, _, count in found:
            starts.append(n[places])
            n[places] += count
        width = int(n.max())
        # Positions that do not count go to an extra last place, which is cut off.
        tokens = some.tokens.new_zeros(len(self.ids), width + 1)
        feats = None if some.feats is None else some.feats.new_zeros(*tokens.shape, some.feats.shape[-1])
        for part, (places, rows, count), start in zip(self.parts, found, starts, strict=True):
            part_feats, part_tokens = part.joined()
            at = torch.arange(part_tokens.shape[1], device=n.device)
            to = places[:, None], torch.where(at < count[:, None], start[:, None] + at, width)
            tokens[to] = part_tokens[rows]
            if feats is not None and part_feats is not None:
                feats[to] = part_feats[rows]
        return Positions(None if feats is None else feats[:, :width], tokens[:, :width], n)

    def absorb(self, drafter: Drafter, state: DraftState, max_len: int) -> DraftState:
        """Let the drafter absorb all positions, ABSORBED at a time. Return each row's state after its last position.

        Rows of the state without an id hold no sequence.
        """
        if not self.parts:
            return state
        self.ids = self.ids + self._new(len(state.hidden) - len(self.ids))
        all_ = self.padded()
        for first in range(0, all_.tokens.shape[1], ABSORBED):
            part = slice(first, first + ABSORBED)
            count = (all_.n - first).clamp(0, ABSORBED)
            feats = None if all_.feats is None else all_.feats[:, part]
            new = drafter.extend(feats, all_.tokens[:, part], count, max_len)
            state = _where(count > 0, new, state)
        return state


def _where(taken: Tensor, new: DraftState, old: DraftState) -> DraftState:
    """Return the rows of `new` that are taken [B], and the others of `old`."""
    hidden, readout = (torch.where(taken[:, None, None], getattr(new, name), getattr(old, name))
                       for name in ("hidden", "readout"))  # fmt: skip
    levels = None if new.levels is None or old.levels is None else torch.where(taken, new.levels, old.levels)
    return DraftState(hidden, readout, new.head, levels)
