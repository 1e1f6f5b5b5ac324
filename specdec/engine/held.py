"""What plain rounds and prompts leave to a drafter that absorbs it later.

To keep a position costs nothing: tensors are put aside as they came, and where each row of the batch stands in them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.contracts import Drafter, DraftState

HOLD = 32  # positions that the drafter absorbs at once
MOST_PARTS = 64  # of which each has rows that have left

# Of one prefill or plain round: features [R,K,F] (None without taps), tokens [R,K], and of these K how many count [R].
Kept = tuple[Tensor | None, Tensor, Tensor]


@dataclass
class Part:
    """Committed positions of a prefill, or of plain rounds with the same rows."""

    rows: np.ndarray  # [B] for each row of the batch its row R here; -1 if it has none
    rounds: list[Kept]
    open: bool = False  # the next round has the same rows

    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the rows that are here: their places in the batch and in this part, and how many of their positions count.
        Those that count stand before those that do not: once a row has ended, none of its positions counts."""
        counts = sum(n for _, _, n in self.rounds)
        here = np.flatnonzero(self.rows >= 0)
        places, rows = (torch.from_numpy(x).to(counts.device) for x in (here, self.rows[here]))
        return places, rows, counts[rows]

    def joined(self) -> tuple[Tensor | None, Tensor]:
        """Features [R,K,F] and tokens [R,K] of all rounds, one behind the other."""
        feats, tokens, _ = zip(*self.rounds, strict=True)
        return None if feats[0] is None else torch.cat(feats, 1), torch.cat(tokens, 1)


class Held:
    """Committed positions that the drafter has not absorbed."""

    def __init__(self, rows: int):
        self.rows, self.parts = rows, list[Part]()

    def put(self, feats: Tensor | None, tokens: Tensor, n: Tensor) -> None:
        """One more position of all rows, for those of which n [B] is 1: feats [B,1,F], tokens [B,1]."""
        if not (self.parts and self.parts[-1].open):
            self.parts.append(Part(np.arange(self.rows), [], open=True))
        self.parts[-1].rounds.append((feats, tokens, n))

    def join(self, rows: int, prompts: Kept | None = None) -> None:
        """So many rows more, below the others, and what their prompts leave."""
        for part in self.parts:
            part.rows, part.open = np.concatenate([part.rows, np.full(rows, -1)]), False
        if prompts is not None:
            self.parts.append(Part(np.concatenate([np.full(self.rows, -1), np.arange(rows)]), [prompts]))
        self.rows += rows

    def compact(self, index: np.ndarray) -> None:
        """Go on with the rows index [B'] only."""
        self.rows = len(index)
        for part in self.parts:
            part.rows, part.open = part.rows[index], False
        self.parts = [part for part in self.parts if (part.rows >= 0).any()]
        if len(self.parts) > MOST_PARTS:  # else a server that never drafts would keep rows that left long ago
            self.parts = [Part(np.arange(self.rows), [self.padded()])]

    def padded(self) -> Kept:
        """All of it, as of one round with the batch's rows. This waits for the device."""
        some_feats, some_tokens, _ = self.parts[0].rounds[0]
        n = torch.zeros(self.rows, dtype=torch.int64, device=some_tokens.device)
        found = [part.index() for part in self.parts]
        starts = []
        for places, _, count in found:
            starts.append(n[places])
            n[places] += count
        width = int(n.max())
        # What does not count goes to a last place, which is cut off.
        tokens = some_tokens.new_zeros(self.rows, width + 1)
        feats = None if some_feats is None else some_feats.new_zeros(*tokens.shape, some_feats.shape[-1])
        for part, (places, rows, count), start in zip(self.parts, found, starts, strict=True):
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
