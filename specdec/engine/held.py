"""What plain rounds and prompts leave to a drafter that absorbs it later.

To keep a position costs nothing: tensors are put aside as they came, and where each row of the batch stands in them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.contracts import Drafter, DraftState
from specdec.structs import Survivors

HOLD = 32  # positions that the drafter absorbs at once
MOST_PARTS = 256  # beyond these they are made one
FEW_PARTS = 16  # up to so many are looked through each time that rows leave

# Of one prefill or plain round: features [R,K,F] (None without taps), tokens [R,K], and of these K how many count [R].
Kept = tuple[Tensor | None, Tensor, Tensor]


@dataclass
class Part:
    """Committed positions of a prefill, or of plain rounds with the same rows."""

    names: list[int]  # of its rows [R]
    rounds: list[Kept]
    open: bool = False  # the next round has the same rows

    def index(self, place_of: dict[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Of the rows that are still in the batch: their places in it and in this part, and how many of their positions
        count. Those that count stand before those that do not: once a row has ended, none of its positions counts."""
        counts = sum(n for _, _, n in self.rounds)
        here = [row for row, name in enumerate(self.names) if name in place_of]
        places = torch.tensor([place_of[self.names[row]] for row in here], device=counts.device)
        rows = torch.tensor(here, device=counts.device)
        return places, rows, counts[rows]

    def joined(self) -> tuple[Tensor | None, Tensor]:
        """Features [R,K,F] and tokens [R,K] of all rounds, one behind the other."""
        feats, tokens, _ = zip(*self.rounds, strict=True)
        return None if feats[0] is None else torch.cat(feats, 1), torch.cat(tokens, 1)


class Held:
    """Committed positions that the drafter has not absorbed. Rows are known by numbers that stay theirs, so parts need
    no change when rows leave or move."""

    def __init__(self, rows: int):
        self.names, self.named = list(range(rows)), rows  # names: of the batch's rows; how many were given
        self.parts, self.look = list[Part](), FEW_PARTS  # look: with so many parts, for those nobody needs

    def put(self, feats: Tensor | None, tokens: Tensor, n: Tensor) -> None:
        """One more position of all rows, for those of which n [B] is 1: feats [B,1,F], tokens [B,1]."""
        if not (self.parts and self.parts[-1].open):
            self.parts.append(Part(self.names, [], open=True))
        self.parts[-1].rounds.append((feats, tokens, n))

    def join(self, first: int, count: int, prompts: Kept | None = None) -> None:
        """So many rows from `first` on are others from now on, and what their prompts leave."""
        self._close()
        known, new, self.names = len(self.names), self._new(count), self._of(max(first, len(self.names)))
        self.names[first : first + count] = new
        if first < known:  # others have left for them
            self._tidy()
        if prompts is not None:
            self.parts.append(Part(new, [prompts]))

    def _new(self, count: int) -> list[int]:
        """Names that no row has."""
        self.named += count
        return list(range(self.named - count, self.named))

    def _of(self, rows: int) -> list[int]:
        """The names of so many rows, of which the last may be without a sequence."""
        return (self.names + self._new(max(rows - len(self.names), 0)))[:rows]

    def compact(self, kept: Survivors) -> None:
        """Go on with these rows only."""
        self._close()
        self.names = kept.of(self.names)
        self._tidy()

    def _close(self) -> None:
        if self.parts:
            self.parts[-1].open = False

    def _tidy(self) -> None:
        """Once there are many parts forget those of which all rows have left, and what rows that left have in the
        others: else a server that never drafts would keep it for long."""
        if len(self.parts) < self.look:
            return
        self.parts = self._needed()
        if len(self.parts) > MOST_PARTS:
            self.parts = [Part(self.names, [self.padded()])]
        self.look = max(FEW_PARTS, 2 * len(self.parts))

    def _needed(self) -> list[Part]:
        here = set(self.names)
        return [part for part in self.parts if not here.isdisjoint(part.names)]

    def padded(self) -> Kept:
        """All of it, as of one round with the batch's rows. This waits for the device."""
        some_feats, some_tokens, _ = self.parts[0].rounds[0]
        n = torch.zeros(len(self.names), dtype=torch.int64, device=some_tokens.device)
        place_of = {name: place for place, name in enumerate(self.names)}
        parts = self._needed()
        found = [part.index(place_of) for part in parts]
        starts = []
        for places, _, count in found:
            starts.append(n[places])
            n[places] += count
        width = int(n.max())
        # What does not count goes to a last place, which is cut off.
        tokens = some_tokens.new_zeros(len(self.names), width + 1)
        feats = None if some_feats is None else some_feats.new_zeros(*tokens.shape, some_feats.shape[-1])
        for part, (places, rows, count), start in zip(parts, found, starts, strict=True):
            part_feats, part_tokens = part.joined()
            at = torch.arange(part_tokens.shape[1], device=n.device)
            to = places[:, None], torch.where(at < count[:, None], start[:, None] + at, width)
            tokens[to] = part_tokens[rows]
            if feats is not None:
                feats[to] = part_feats[rows]
        return None if feats is None else feats[:, :width], tokens[:, :width], n

    def absorb(self, drafter: Drafter, state: DraftState, max_len: int) -> DraftState:
        """The drafter's state behind all of it, HOLD positions at a time. A row's state is that of its last part."""
        if not self.parts:
            return state
        self.names = self._of(len(state.hidden))
        feats, tokens, n = self.padded()
        for first in range(0, tokens.shape[1], HOLD):
            part = slice(first, first + HOLD)
            count = (n - first).clamp(0, HOLD)
            new = drafter.extend(None if feats is None else feats[:, part], tokens[:, part], count, max_len)
            state = _where(count > 0, new, state)
        return state


def _where(taken: Tensor, new: DraftState, old: DraftState) -> DraftState:
    """The rows of `new` that are taken [B], else those of `old`."""
    hidden, readout = (torch.where(taken[:, None, None], getattr(new, name), getattr(old, name))
                       for name in ("hidden", "readout"))  # fmt: skip
    levels = None if new.levels is None else torch.where(taken, new.levels, old.levels)
    return DraftState(hidden, readout, new.head, levels)
