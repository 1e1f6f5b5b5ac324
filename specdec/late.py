"""The loop that reads one round late: while the host reads what a round emitted, the device already runs the next.

Which rows have ended the device decides for itself (`Progress`), by the rule of `rows.Row.add`, so a row stands still
from the same round on as in the loop that reads at once: text, traces and the room that caches need are the same. Only
what a `Stop` ends is noticed a round late; that round of the row is void, and `Row` drops it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.cache import KVCache
from specdec.rows import Row
from specdec.types import DraftState, DraftTree, Verdict


@dataclass
class Made:
    """What a round made on the device. tree, verdict and logits are None if it drafted nothing, or nobody looks."""

    tokens: Tensor  # [B,P] emitted tokens, as in `Verdict`
    n: Tensor  # [B] how many of them
    logprobs: Tensor | None = None  # [B,P] if asked for
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    logits: Tensor | None = None  # [B,N,V]

    def read(self) -> list[Tensor]:
        """What the host wants to know."""
        return [self.tokens, self.n] if self.logprobs is None else [self.tokens, self.n, self.logprobs]


@dataclass
class Outcome:
    """A round as the host has read it, as in `engine.RoundReport`."""

    emitted: list[list[int]]
    accepted: list[int]
    logprobs: list[list[float]] | None
    made: Made


class Progress:
    """How far the rows are, on the device: active [B], which still decode; left [B], how many tokens each may add."""

    def __init__(self, batch: int, device: torch.device):
        self.active = torch.zeros(batch, dtype=torch.bool, device=device)
        self.left = torch.zeros(batch, dtype=torch.int64, device=device)

    def begin(self, rows: Sequence[Row]) -> None:
        """Start from what the host knows of the rows."""
        self.active.copy_(torch.tensor([row.finish is None for row in rows]))
        self.left.copy_(torch.tensor([row.limit - len(row.tokens) for row in rows]))

    def settle(self, tokens: Tensor, n: Tensor, eos: Tensor) -> None:
        """A round emitted the first n [B] of tokens [B,P]; eos [E] end a row. Changes both tensors in place."""
        kept = torch.where(self.active, n.minimum(self.left), 0)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        ends = (tokens[..., None] == eos).any(-1) & (place < kept[:, None])
        self.left -= kept
        self.active &= ~ends.any(1) & (self.left > 0)


def play(
    engine, root: Tensor, state: DraftState | None, cache: KVCache, progress: Progress, eos: Tensor, how: tuple, **plain
) -> tuple[Tensor, DraftState | None, Made]:
    """A round of an `engine.Engine` and what follows from it on the device: the next root and state, and what it made.

    how: the arguments of `Engine.round` from `sampling` on; plain: further ones of `Engine.plain_round`.
    """
    if engine.drafter is None:
        root, logprobs = engine.plain_round(root, cache, progress.active, *how, **plain)
        made = Made(root[:, None], torch.ones_like(root), None if logprobs is None else logprobs[:, None])
    else:
        root, state, tree, verdict, logits = engine.round(root, state, cache, progress.active, *how)
        made = Made(verdict.tokens, verdict.n, verdict.logprobs, tree, verdict, logits)
    progress.settle(made.tokens, made.n, eos)
    return root, state, made


class Rounds:
    """The rounds of one call, one after the other, on whatever the engine allocates for each."""

    def __init__(
        self, engine, rows: Sequence[Row], root: Tensor, state: DraftState | None, cache: KVCache, *, eos, how
    ):
        self.engine, self.root, self.state, self.cache, self.how = engine, root, state, cache, how
        self.progress = Progress(len(rows), root.device)
        self.progress.begin(rows)
        self.eos = torch.tensor(sorted(eos), dtype=torch.int64, device=root.device)

    def launch(self, bound: int) -> Made:
        """Start the next round; no row that still decodes has committed more than `bound` tokens."""
        self.cache.bound = bound
        self.root, self.state, made = play(
            self.engine, self.root, self.state, self.cache, self.progress, self.eos, self.how
        )
        return made


class Reader:
    """What rounds emitted, on its way to the host: two sets of buffers in turn, pinned if it comes from a GPU."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.buffers: list[list[Tensor]] = [[], []]
        self.events = [torch.cuda.Event(), torch.cuda.Event()] if self.cuda else []
        self.turn = 0

    def start(self, made: Made) -> int:
        """Copy without waiting; the number returned is for `finish`. No more than two may be under way."""
        self.turn = 1 - self.turn
        source = made.read()
        if not self.buffers[self.turn]:
            self.buffers[self.turn] = [torch.empty(x.shape, dtype=x.dtype, pin_memory=self.cuda) for x in source]
        for buffer, x in zip(self.buffers[self.turn], source, strict=True):
            buffer.copy_(x, non_blocking=True)
        if self.cuda:
            self.events[self.turn].record()
        return self.turn

    def finish(self, number: int, made: Made) -> Outcome:
        """Wait for that copy only, and not for what was launched since."""
        if self.cuda:
            self.events[number].synchronize()
        tokens, counts, *rest = (buffer.tolist() for buffer in self.buffers[number])
        emitted = [row[:n] for row, n in zip(tokens, counts, strict=True)]
        return Outcome(emitted, [n - 1 for n in counts], rest[0] if rest else None, made)


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
