"""The states of recurrent layers (linear attention, state spaces, convolutions) after the committed text.

Attention forgets a rejected draft by itself, as its slot is overwritten. A recurrent state does not: a token cannot be
removed from it. So a forward works on copies and leaves the committed states as they are. It also leaves a `Window`,
from which `commit` takes the states after the accepted tokens, in one of two ways:

- a state for each verified position, of which commit takes one by its slot. The layer takes the positions one by one,
  as plain decoding does. Memory: all states of the layer times N.
- the inputs of the layer, with which the accepted tokens are replayed from the committed state. Memory: little.
  Time: the layer runs once more over the accepted tokens of rows that rejected something.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from specdec.model.cache import KVCache, cache_bytes
from specdec.structs import Survivors

State = dict[str, Tensor]  # by name, each [R, ...]
Sizes = tuple[int, int, int, int]  # rows, slots, key heads and size of a head, as for `KVCache`
# A layer over T positions from a state, which it may change: (x [R,T,H], state) -> (what it makes of x, state after).
Run = Callable[[Tensor, State], tuple[Tensor, State]]
BUDGET = 2**30  # bytes of all windows of a forward: each position's state is stored if all of them fit into this
MOST_STEPS = 64  # positions that a layer takes one by one; a prompt has more


@dataclass(frozen=True)
class Plan:
    """How a forward over N positions runs recurrent layers.

    each: store a state for each position. lengths: of prompts, right-padded; their states are those after so many
    positions. again: the positions follow those of the last forward, of which nothing was committed.
    """

    each: bool = True
    lengths: Sequence[int] | None = None
    again: bool = False


Replay = Callable[[Sequence[int], int], State]


def no_replay(rows: Sequence[int], count: int) -> State:
    """Raise RuntimeError: the committed state is not the one from which the positions were computed."""
    raise RuntimeError("positions that follow an uncommitted forward cannot be committed in part")


@dataclass
class Window:
    """States or inputs of a layer from a forward over N positions, from which `commit` continues."""

    last: State  # after all positions, or after the first `lengths` of each row
    lengths: Sequence[int]
    states: list[State] | None = None  # after each position
    replay: Replay = no_replay  # rows, a number of tokens -> their states after these


class RecurrentCache:
    """The committed states of one layer."""

    def __init__(self, tensors: State):
        """Hold committed states, tensors [rows,...] by name, without a window."""
        self.tensors = tensors
        self.window: Window | None = None

    @classmethod
    def empty(cls, shapes: State, rows: int) -> "RecurrentCache":
        """Return zero states of `rows` rows. shapes: states of one row or more, for their sizes and dtypes."""
        return cls({name: x.new_zeros(rows, *x.shape[1:]) for name, x in shapes.items()})

    def narrow(self, first: int, count: int) -> "RecurrentCache":
        """Return a cache over the memory of `count` rows from `first` on."""
        return RecurrentCache({name: x.narrow(0, first, count) for name, x in self.tensors.items()})

    @property
    def made(self) -> Window:
        """Return the window of the last forward. Raises RuntimeError if there was none since the last commit."""
        if self.window is None:
            raise RuntimeError("nothing to commit: no forward has run since the last commit")
        return self.window

    def clear(self) -> None:
        """Set the states of all rows to zero."""
        for x in self.tensors.values():
            x.zero_()

    def compact(self, survivors: Survivors) -> None:
        """Move the states of surviving rows to their new places."""
        for x in self.tensors.values():
            for row, place in survivors.moves:
                x[place] = x[row]

    def checkpoint(self, again: bool = False, rows: Sequence[int] | None = None) -> State:
        """Copy the committed states, or, if `again`, those after the last forward, of some rows or all."""
        state = self.made.last if again else self.tensors
        return {name: x.clone() if rows is None else x[rows] for name, x in state.items()}

    def forward(self, run: Run, x: Tensor, plan: Plan) -> Tensor:
        """Run the layer over x [R,N,H] after the committed states, and store what `commit` needs."""
        rows, n, _ = x.shape
        if plan.lengths is not None:
            return self._ragged(run, x, plan.lengths)
        state = self.checkpoint(plan.again)
        if not plan.each:
            out, last = run(x, state)

            def replay(some: Sequence[int], count: int) -> State:
                return run(x[some, :count], self.checkpoint(rows=some))[1]

            self.window = Window(last, [n] * rows, replay=no_replay if plan.again else replay)
            return out
        outs, states = [], []
        for i in range(n):
            # A copy for each position: the layer may write into the one that it is given.
            out, state = run(x[:, i : i + 1], {name: part.clone() for name, part in state.items()})
            outs.append(out)
            states.append(state)
        self.window = Window(state, [n] * rows, None if plan.again else states)
        return torch.cat(outs, 1)

    def _ragged(self, run: Run, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Run prompts of one length at a time: padding must not enter a row's state."""
        last, out = self.checkpoint(), torch.zeros_like(x)
        for length in sorted(set(lengths)):
            some = [row for row, own in enumerate(lengths) if own == length]
            out[some, :length], state = run(x[some, :length], self.checkpoint(rows=some))
            for name, part in state.items():
                last[name][some] = part
        self.window = Window(last, lengths)
        return out

    def commit(self, n: Tensor) -> None:
        """Continue from the states after the first n [B] positions of the last forward."""
        window, self.window = self.made, None
        if window.states is not None:
            rows = torch.arange(len(n), device=n.device)
            for name, stored in self.tensors.items():
                stored.copy_(torch.stack([stored, *(state[name] for state in window.states)], 1)[rows, n])
            return
        counts = n.tolist()
        whole = [row for row, count in enumerate(counts) if count == window.lengths[row]]
        found = [(whole, {name: x[whole] for name, x in window.last.items()})]
        for count in sorted(set(counts) - {0}):
            some = [row for row, own in enumerate(counts) if own == count and own != window.lengths[row]]
            if some:
                found.append((some, window.replay(some, count)))
        for some, state in found:
            for name, part in state.items():
                self.tensors[name][some] = part


class HybridCache(KVCache):
    """The slots of a model's attention layers, and a `RecurrentCache` for each recurrent layer."""

    def __init__(self, attention: Sequence[int], shapes: dict[int, State], budget: float, sizes: Sizes, like: Tensor):
        """Allocate an empty cache. `attention`: indices of the layers that attend. sizes, like: as for `KVCache`.

        shapes: states of the recurrent layers, as for `RecurrentCache.empty`. budget: bytes for windows; inf: the
        layers are exact over one position at a time only.
        """
        self.place = {layer: place for place, layer in enumerate(attention)}
        self.states = {layer: RecurrentCache.empty(shape, sizes[0]) for layer, shape in shapes.items()}
        self.row_bytes, self.budget = state_bytes(shapes), budget
        super().__init__(len(attention), *sizes, like=like)

    @override
    def use(self, first: int, count: int) -> None:
        super().use(first, count)
        self.recurrent = {layer: state.narrow(first, count) for layer, state in self.states.items()}

    def plan(self, n: int, lengths: Sequence[int] | None, again: bool) -> Plan:
        """Return how a forward over n positions runs the recurrent layers."""
        fits = n <= MOST_STEPS and self.batch * n * self.row_bytes <= self.budget
        return Plan(fits or self.budget == inf, lengths, again)

    @override
    def clear(self, batch: int) -> Self:
        for state in self.states.values():
            state.clear()
        return super().clear(batch)

    @override
    def admit(self, first: int, count: int, longest: int) -> Self:
        part = super().admit(first, count, longest)
        for state in part.recurrent.values():
            state.clear()
        return part

    @override
    def scratch(self) -> "HybridCache":
        shapes = {layer: state.tensors for layer, state in self.states.items()}
        return HybridCache(list(self.place), shapes, self.budget, (1, self.slots, *self.shape), self.like)

    @override
    def take(self, other: KVCache, length: int) -> None:
        super().take(other, length)
        if not isinstance(other, HybridCache):
            raise TypeError("a cache with recurrent states takes its row from one of its kind")
        for own, source in zip(self.recurrent.values(), other.recurrent.values(), strict=True):
            for name, x in own.tensors.items():
                x.copy_(source.tensors[name])

    @override
    def compact(self, survivors: Survivors) -> None:
        for state in self.recurrent.values():
            state.compact(survivors)
        super().compact(survivors)

    @override
    def committed(self, row: int) -> list[Tensor]:
        states = [part[row] for state in self.recurrent.values() for part in state.tensors.values()]
        return super().committed(row) + states

    @override
    def commit(self, path: Tensor, n: Tensor, max_len: int) -> None:
        """Commit as `KVCache.commit`. The nodes are those of a chain, so its length determines the path."""
        if self.layers:
            super().commit(path, n, max_len)
        else:
            self.advance(n, max_len)

    @override
    def advance(self, n: Tensor, max_len: int) -> None:
        for state in self.recurrent.values():
            state.commit(n)
        super().advance(n, max_len)


def state_bytes(shapes: dict[int, State]) -> int:
    """Return the bytes of the recurrent states of one row."""
    return sum(x[0].nbytes for shape in shapes.values() for x in shape.values())


def hybrid_bytes(layers: int, shapes: dict[int, State], sizes: Sizes, like: Tensor) -> int:
    """Return the most bytes of a `HybridCache`: slots, states twice while rows commit, and windows."""
    return cache_bytes(layers, *sizes, like=like) + 2 * sizes[0] * state_bytes(shapes) + BUDGET
