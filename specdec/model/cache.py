"""The key/value cache: static, one tensor per layer, lengths on the device."""

import math

import torch
from torch import Tensor

from specdec.kernels import kernel_for


def cache_bytes(layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, like: Tensor) -> int:
    """What a `KVCache` of these sizes takes, lengths and the like aside."""
    return 2 * layers * batch * slots * kv_heads * head_dim * like.element_size()


class KVCache:
    """Keys and values of committed tokens, and after them scratch slots for a tree.

    One tensor per layer [2, B, S, K, Dh] (a single big one makes compiled forwards copy it). Slots 0..lens[b]-1 of row
    b are committed; a forward of N nodes writes slots lens[b]..lens[b]+N-1; `commit` moves the accepted ones down and
    the rest is simply overwritten next time.

    `bound` is a host-side upper bound of lens, of the rows that still decode: attention reads only `bound` plus the
    scratch slots in use, not all S.
    It costs no synchronisation, because a round emits at most P tokens; the engine tightens it when it reads them.
    """

    def __init__(self, layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, like: Tensor):
        shape = (2, batch, slots, kv_heads, head_dim)
        self.layers = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(layers)]
        self._views()
        self.lens = torch.zeros(batch, dtype=torch.int64, device=like.device)
        self.max_len = 0
        self.move = kernel_for("commit", like)
        if self.move is not None:
            self.addresses = torch.tensor([kv.data_ptr() for kv in self.layers], device=like.device)

    def _views(self) -> None:
        """The views that every forward needs, made once: on the CPU a view costs a good part of a small operator."""
        _, self.batch, self.slots, *_ = self.layers[0].shape
        self.rows = [kv.view(2, self.batch * self.slots, -1) for kv in self.layers]
        self.flat = [rows.unbind() for rows in self.rows]  # keys and values, each [B*S, K*Dh]
        self.heads = [kv.transpose(2, 3).unbind() for kv in self.layers]  # keys and values, each [B,K,S,Dh]
        self.row_start = torch.arange(self.batch, device=self.layers[0].device)[:, None] * self.slots

    def clear(self) -> "KVCache":
        """Forget all positions, in place; what the slots hold stays, unseen."""
        self.lens.zero_()
        self.max_len = 0
        return self

    def compact(self, index: Tensor) -> None:
        """Go on with the rows index [B'], ascending, of which none is longer than `bound`, and forget the others. They
        move together at the front of the same memory: beside it one layer's slots are held for a moment."""
        for layer, kv in enumerate(self.layers):
            moved = kv[:, :, : self.max_len].index_select(1, index)
            shape = 2, len(index), *kv.shape[2:]
            self.layers[layer] = kv.flatten()[: math.prod(shape)].view(shape)
            self.layers[layer][:, :, : self.max_len] = moved
        self.lens = self.lens[index]
        self._views()

    def slots_of(self, offsets: Tensor) -> Tensor:
        """Flat indices [B*N] of the slots lens + offsets; offsets [N] or [B,N]."""
        return (self.row_start + self.lens[:, None] + offsets).flatten()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [B,N,K,Dh] at flat indices `slots` [B*N]."""
        keys, values = self.flat[layer]
        keys.index_copy_(0, slots, k.reshape(slots.shape[0], -1))
        values.index_copy_(0, slots, v.reshape(slots.shape[0], -1))

    def read(self, layer: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots from `first` on, each [B,K,count,Dh]."""
        keys, values = self.heads[layer]
        return keys.narrow(2, first, count), values.narrow(2, first, count)

    def commit(self, path: Tensor, n: Tensor, max_len: int) -> None:
        """Keep the nodes path [B,P] of the last forward: slot lens+path[k] -> lens+k; then lens += n [B] <= bound."""
        if self.move is not None:
            self.move(self.addresses, self.layers[0], self.lens, path, n)
        elif path.shape[1] > 1:
            offsets = torch.arange(1, path.shape[1], device=path.device)
            source, destination = self.slots_of(path[:, 1:]), self.slots_of(offsets)
            for rows in self.rows:
                rows.index_copy_(1, destination, rows.index_select(1, source))
        self.advance(n, max_len)

    def advance(self, n: Tensor, max_len: int) -> None:
        """Keep the first n [B] positions of the last forward as they lie."""
        self.lens += n
        self.max_len = max_len
