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


@dataclass
class Part:
    """Committed positions of a prefill, or of plain rounds with the same rows."""

    rows: np.ndarray  # [B] for each row of the batch its row R here; -1 if it has none
    feats: list[Tensor | None]  # [R,K,F] of each round; None without taps
    tokens: list[Tensor]  # [R,K]
    n: list[Tensor]  # [R] of the K how many count
    open: bool = False  # the next round has the same rows

    @property
    def width(self) -> int:
        return sum(tokens.shape[1] for tokens in self.tokens)

    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the rows that are here: their places in the batch and in this part, and how many of their positions count.
        These stand first, as a row that has ended stays so."""
        here, device = np.flatnonzero(self.rows >= 0), self.n[0].device
        places, rows = (torch.from_numpy(x).to(device) for x in (here, self.rows[here]))
        return places, rows, sum(self.n)[rows]


class Held:
    """Committed positions that the drafter has not absorbed."""

    def __init__(self, rows: int):
        self.rows, self.parts = rows, list[Part]()

    def put(self, feats: Tensor | None, tokens: Tensor, n: Tensor) -> None:
        """One more position of all rows, for those of which n [B] is 1: feats [B,1,F], tokens [B,1]."""
        if not (self.parts and self.parts[-1].open):
            self.parts.append(Part(np.arange(self.rows), [], [], [], open=True))
        last = self.parts[-1]
        last.feats.append(feats)
        last.tokens.append(tokens)
        last.n.append(n)

    def join(self, rows: int, prompts: tuple[Tensor | None, Tensor, Tensor] | None = None) -> None:
        """So many rows more, below the others. prompts: features [R,K,F], tokens [R,K], and how many count [R]."""
        for part in self.parts:
            part.rows, part.open = np.concatenate([part.rows, np.full(rows, -1)]), False
        if prompts is not None:
            feats, tokens, n = prompts
            joined = np.concatenate([np.full(self.rows, -1), np.arange(rows)])
            self.parts.append(Part(joined, [feats], [tokens], [n]))
        self.rows += rows

    def compact(self, index: np.ndarray) -> None:
        """Go on with the rows index [B'] only."""
        self.rows = len(index)
        for part in self.parts:
            part.rows, part.open = part.rows[index], False
        self.parts = [part for part in self.parts if (part.rows >= 0).any()]
        if len(self.parts) > MOST_PARTS:  # else a server that never drafts would keep rows that left long ago
            feats, tokens, n = self.padded()
            self.parts = [Part(np.arange(self.rows), [feats], [tokens], [n])]

    def padded(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Features [B,K,F], tokens [B,K], and how many of them count [B]. This waits for the device."""
        first = self.parts[0]
        n = torch.zeros(self.rows, dtype=torch.int64, device=first.n[0].device)
        found = [part.index() for part in self.parts]
        starts = []
        for places, _, count in found:
            starts.append(n[places])
            n[places] += count
        width = int(n.max())
        # What does not count goes to a last place, which is cut off.
        tokens = first.tokens[0].new_zeros(self.rows, width + 1)
        feats = None if first.feats[0] is None else first.feats[0].new_zeros(*tokens.shape, first.feats[0].shape[-1])
        for part, (places, rows, count), start in zip(self.parts, found, starts, strict=True):
            at = torch.arange(part.width, device=n.device)
            to = places[:, None], torch.where(at < count[:, None], start[:, None] + at, width)
            tokens[to] = torch.cat(part.tokens, 1)[rows]
            if feats is not None:
                feats[to] = torch.cat(part.feats, 1)[rows]
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
