"""What drafters with a cache of their own layers share."""

from abc import abstractmethod

from torch import Tensor

from specdec.contracts import Drafter, DraftState
from specdec.drafters.layers import DraftShape
from specdec.model.cache import KVCache, cache_bytes
from specdec.model.layers import LinearMap, freeze
from specdec.model.rope import RopeTable


class CachedDrafter(Drafter):
    """A drafter of one head. A subclass says how committed positions are absorbed (`absorb`)."""

    head: LinearMap
    shape: DraftShape
    rope: RopeTable
    embedding: Tensor
    capturable = True
    learns = True
    recompute = False
    depth: int  # layers that keep keys and values
    scratch = 0  # slots beyond those that are asked for

    def heads_in_use(self) -> list[LinearMap]:
        return [self.head]

    def set_heads(self, heads: list[LinearMap]) -> None:
        (self.head,) = heads

    def reset(self, rows: int, slots: int) -> None:
        shape, slots = self.shape, slots + self.scratch
        freeze(self)
        self.rope.reserve(slots, self.embedding)
        cache = KVCache(self.depth, rows, slots, shape.kv_heads, shape.head_dim, like=self.embedding)
        self.cache = cache.clear(0)

    def cache_bytes(self, rows: int, slots: int) -> int:
        shape, slots = self.shape, slots + self.scratch
        return cache_bytes(self.depth, rows, slots, shape.kv_heads, shape.head_dim, self.embedding)

    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        part = self.cache.admit(row, len(first), tokens.shape[1])
        return self.absorb(part, feats, tokens, n, tokens.shape[1], prefill=True)

    def extend(self, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        return self.absorb(self.cache, feats, tokens, n, max_len)

    @abstractmethod
    def absorb(
        self, cache: KVCache, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int, prefill: bool = False
    ) -> DraftState:
        """Write the first n [B] of P positions to `cache`, and draft behind them. The rest is as for `extend`."""
