"""The key/value cache: static, one tensor per layer, lengths on the device; rows can join and leave."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from specdec.ops.commit import commit
from specdec.structs import Survivors


def cache_bytes(layers: int, rows: int, slots: int, kv_heads: int, head_dim: int, *, like: Tensor) -> int:
    """Return the bytes of a `KVCache` of these sizes, without lengths and other small tensors."""
    return 2 * layers * rows * slots * kv_heads * head_dim * like.element_size()


class KVCache:
    """Keys and values of committed tokens, and after them scratch slots for a tree.

    There is one tensor per layer, [2, R, S, K, Dh] for R rows at most (a single big one makes compiled forwards copy
    it). Of these the first B are in use. Slots 0..lens[b]-1 of row b are committed. A forward of N nodes writes slots
    lens[b]..lens[b]+N-1; `commit` moves the accepted ones down, and the rest is simply overwritten next time.

    `max_len` is a host-side upper bound of lens, over the rows that still decode. Attention reads only `max_len` plus
    the scratch slots in use, not all S. Keeping it costs no synchronisation: a round emits at most P tokens, and the
    engine tightens `max_len` when it reads them.
    """

    exact = False  # `max_len` is the length of the only row, not just a bound: a single position needs no mask
    captured = False  # rounds that use it are captured, so operators alone may compute with its contents

    def __init__(self, layers: int, rows: int, slots: int, kv_heads: int, head_dim: int, *, like: Tensor):
        """Allocate `rows` empty rows of `slots` slots, all in use, with the device and dtype of `like`."""
        shape = (2, rows, slots, kv_heads, head_dim)
        self.memory = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(layers)]
        self.slots, self.shape, self.like = slots, (kv_heads, head_dim), like.new_empty(0)
        self.flat = [kv.view(2, rows * slots, -1).unbind() for kv in self.memory]  # keys and values, each [R*S,K*Dh]
        self.places = torch.arange(slots, device=like.device)
        self.all_lens = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.all_starts = torch.arange(rows, device=like.device)[:, None] * slots  # made once: graphs read it
        self.max_len = 0
        self.move = commit(self.memory)
        self.use(0, rows)

    def use(self, first: int, count: int) -> None:
        """Use `count` rows from `first` on, with their contents.

        The views that every forward needs are made here, once: on the CPU a view costs a good part of a small operator.
        """
        self.batch = count
        self.layers = [kv[:, first : first + count] for kv in self.memory]  # each [2,B,S,K,Dh]
        self.heads = [kv.transpose(2, 3).unbind() for kv in self.layers]  # keys and values, each [B,K,S,Dh]
        self.lens = self.all_lens[first : first + count]
        self.row_start = self.all_starts[first : first + count]

    def clear(self, batch: int) -> Self:
        """Empty all rows and use the first `batch`. The slots keep their contents, which nothing sees."""
        self.all_lens.zero_()
        self.max_len = 0
        self.use(0, batch)
        return self

    def admit(self, first: int, count: int, longest: int) -> Self:
        """Return rows `first` to `first + count - 1`, emptied, as a cache of their own over the same memory.

        The returned cache prefills the new rows while other rows decode. From now on this cache uses the new rows too,
        and they hold up to `longest` positions.
        """
        end, room = first + count, len(self.all_lens)
        if first > self.batch or end > room:
            raise ValueError(f"rows {first} to {end - 1} cannot join a cache of {self.batch} rows with room for {room}")
        if end > self.batch:
            self.use(0, end)
        self.max_len = max(self.max_len, longest)
        part = type(self).__new__(type(self))
        vars(part).update(vars(self), max_len=0)
        part.use(first, count)
        part.lens.zero_()
        return part

    def scratch(self) -> "KVCache":
        """Return an empty cache of one row, with as many slots, in memory of its own."""
        return KVCache(len(self.memory), 1, self.slots, *self.shape, like=self.like)

    def take(self, other: "KVCache", length: int) -> None:
        """Copy the first `length` tokens of the only row of `other` into the only row of this part of a cache."""
        self.hold(other.layers, length)

    def hold(self, layers: Sequence[Tensor], length: int) -> None:
        """Fill the only row with the first `length` tokens of keys and values [2,1,S,K,Dh]."""
        for own, given in zip(self.layers, layers, strict=True):
            own[:, :, :length] = given[:, :, :length]
        self.lens.fill_(length)
        self.max_len = length

    def compact(self, survivors: Survivors) -> None:
        """Drop all rows but these, none of which is longer than `max_len`."""
        for layer in self.layers:
            for row, place in survivors.moves:  # row by row: on the CPU operators with indices take six times as long
                layer[:, place, : self.max_len] = layer[:, row, : self.max_len]
        self.lens[: survivors.count] = self.lens[survivors.index]
        self.use(0, survivors.count)

    def slots_of(self, offsets: Tensor) -> Tensor:
        """Return flat indices [B*N] of the slots lens + offsets; offsets [N] or [B,N]."""
        return (self.row_start + self.lens[:, None] + offsets).flatten()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [B,N,K,Dh] at flat indices `slots` [B*N]."""
        keys, values = self.flat[layer]
        keys.index_copy_(0, slots, k.reshape(slots.shape[0], -1))
        values.index_copy_(0, slots, v.reshape(slots.shape[0], -1))

    def committed(self, row: int) -> list[Tensor]:
        """Return the stored state of a row's committed tokens: all that later forwards see of them."""
        length = int(self.lens[row])
        return [layer[:, row, :length] for layer in self.layers]

    def commit(self, path: Tensor, n: Tensor, max_len: int) -> None:
        """Commit nodes path [B,P] of the last forward: slot lens+path[k] -> lens+k; lens += n [B] <= max_len."""
        self.move(self.lens, path, n)
        self.advance(n, max_len)

    def advance(self, n: Tensor, max_len: int) -> None:
        """Commit the first n [B] positions of the last forward in place."""
        self.lens += n
        self.max_len = max_len
