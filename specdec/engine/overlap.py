"""The loop that reads one round late: while the host reads what a round emitted, the device already runs the next.

Which rows have ended the device decides for itself (`Progress`), by the rule of `rows.Row.add`, so a row stands still
from the same round on as in the loop that reads at once: text, traces and the room that caches need are the same. Only
what a `Stop` ends is noticed a round late; that round of the row is void, and `Row` drops it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdec.contracts import DraftState
from specdec.engine.batch import Live, Outcome, RoundOutput
from specdec.engine.sequence import Row
from specdec.model.cache import KVCache


class Progress:
    """How far the rows are, on the device: active [B], which still decode; left [B], how many tokens each may add."""

    def __init__(self, batch: int, device: torch.device):
        self.active = torch.zeros(batch, dtype=torch.bool, device=device)
        self.left = torch.zeros(batch, dtype=torch.int64, device=device)

    def begin(self, rows: Sequence[Row]) -> None:
        """Start from what the host knows of the rows."""
        self.active.copy_(torch.tensor([row.finish is None for row in rows]))
        self.left.copy_(torch.tensor([row.limit - len(row.tokens) for row in rows]))

    def compact(self, index: Tensor) -> None:
        """Go on with the rows index [B'] only."""
        self.active, self.left = self.active[index], self.left[index]

    def settle(self, tokens: Tensor, n: Tensor, eos: Tensor) -> None:
        """A round emitted the first n [B] of tokens [B,P]; eos [E] end a row. Changes both tensors in place."""
        kept = torch.where(self.active, n.minimum(self.left), 0)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        ends = (tokens[..., None] == eos).any(-1) & (place < kept[:, None])
        self.left -= kept
        self.active &= ~ends.any(1) & (self.left > 0)


class Rounds:
    """The rounds of one call, one after the other, on whatever the engine allocates for each."""

    def __init__(
        self, engine, rows: Sequence[Row], root: Tensor, state: DraftState | None, cache: KVCache, *, eos, how
    ):
        self.live = Live(engine, rows, root, state, cache, how)
        self.progress = Progress(len(rows), root.device)
        self.progress.begin(rows)
        self.eos = torch.tensor(sorted(eos), dtype=torch.int64, device=root.device)

    def launch(self, max_len: int) -> RoundOutput:
        """Start the next round; no row that still decodes has committed more than `bound` tokens."""
        live = self.live
        kept = live.shed(live.ended())
        if kept is not None:
            self.progress.compact(kept)
        live.cache.max_len = max_len
        made = live.play(self.progress.active)
        self.progress.settle(made.tokens, made.n, self.eos)
        return made


class Reader:
    """What rounds emitted, on its way to the host: two sets of buffers in turn, pinned if it comes from a GPU."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.buffers: list[list[Tensor]] = [[], []]
        self.events = [torch.cuda.Event(), torch.cuda.Event()] if self.cuda else []
        self.turn = 0

    def start(self, made: RoundOutput) -> int:
        """Copy without waiting; the number returned is for `finish`. No more than two may be under way."""
        self.turn = 1 - self.turn
        source = made.read()
        if [x.shape for x in self.buffers[self.turn]] != [x.shape for x in source]:  # rows may have been dropped
            self.buffers[self.turn] = [torch.empty(x.shape, dtype=x.dtype, pin_memory=self.cuda) for x in source]
        for buffer, x in zip(self.buffers[self.turn], source, strict=True):
            buffer.copy_(x, non_blocking=True)
        if self.cuda:
            self.events[self.turn].record()
        return self.turn

    def finish(self, number: int, made: RoundOutput) -> Outcome:
        """Wait for that copy only, and not for what was launched since."""
        if self.cuda:
            self.events[number].synchronize()
        return Outcome(made, *(buffer.tolist() for buffer in self.buffers[number]))


def read_late(rows: Sequence[Row], rounds, path: int, device: torch.device) -> Iterator[Outcome]:
    """Run `rounds` until all rows have ended, and yield every round's outcome after the next was launched. Whoever
    takes an outcome records it in the rows before taking another. path: P, the most tokens that a round emits.

    A round that the rows' limits show to be void is not launched, so what is launched in vain is one round, where a
    text ends early."""
    reader, waiting = Reader(device), None
    while waiting is not None or any(row.finish is None for row in rows):
        launched = None
        going = [row for row in rows if row.finish is None]
        # The round under way gives every row a token at least.
        if waiting is None or any(row.limit - len(row.tokens) > 1 for row in going):
            known = max(len(row.prompt) + len(row.tokens) - 1 for row in going)
            made = rounds.launch(known if waiting is None else known + path)
            launched = reader.start(made), made
        if waiting is not None:
            yield reader.finish(*waiting)
            if all(row.finish is not None for row in rows):
                return
        waiting = launched
