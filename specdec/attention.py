"""Attention of a few new positions over a cache: one function for decoding, trees and prefill."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.cache import KVCache


def tree_mask(lens: Tensor, ancestors: Tensor, slots: int) -> Tensor:
    """Key slot s is visible to node i iff s < lens or ancestors[i, s - lens].

    lens [B], ancestors [B,N,M] (bool, M scratch slots) -> [B,N,slots] bool.
    """
    offset = torch.arange(slots, device=lens.device) - lens[:, None]  # [B,S]
    n, m = ancestors.shape[1:]
    inside = ancestors.gather(2, offset.clamp(0, m - 1)[:, None].expand(-1, n, -1))
    return torch.where(offset[:, None] < 0, True, inside & (offset[:, None] < m))


def packed_mask(mask: Tensor, groups: int) -> Tensor:
    """mask [B,N,S] -> [B,1,groups*N,S]: the same for each of the query heads that share a key head."""
    b, n, slots = mask.shape
    return mask[:, None, None].expand(b, 1, groups, n, slots).reshape(b, 1, groups * n, slots)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """q [B,N,heads,Dh] over keys and values [B,K,S,Dh] -> [B,N,heads*Dh].

    mask [B,1,groups*N,S] bool, from `packed_mask`, or None if every slot is visible to every node. The query heads that
    share a key head are packed along the node axis, so keys and values are never repeated.
    """
    b, n, heads, dim = q.shape
    kv_heads = keys.shape[1]
    if n == 1:  # the same as below without five views, which take as long as the attention itself on the CPU
        out = F.scaled_dot_product_attention(q.view(b, kv_heads, heads // kv_heads, dim), keys, values, attn_mask=mask)
        return out.reshape(b, 1, heads * dim)
    groups = heads // kv_heads
    packed = q.view(b, n, kv_heads, groups, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, groups * n, dim)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask)
    return out.view(b, kv_heads, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(b, n, heads * dim)


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Self-attention of a fresh prompt: q [B,T,heads,Dh], k and v [B,T,K,Dh] -> [B,T,heads*Dh]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(2)


class NoCache:
    """The view of a forward that keeps nothing: causal over its own positions. For training."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_causal(q, k, v)


class CacheView:
    """What the layers of one forward share: where n new positions go in the cache, and what each of them sees.

    The new positions take the scratch slots from lens + offset on. ancestors [B,n,offset+n] bool tells which scratch
    slots each of them sees, itself included; None means causal. All committed slots are visible. groups is the number
    of query heads to a key head. A single causal position of a single row reads `bound` slots without a mask: there,
    in plain decoding, the bound must be exact.
    """

    def __init__(self, cache: KVCache, n: int, ancestors: Tensor | None, groups: int, offset: int = 0):
        nodes = torch.arange(offset, offset + n, device=cache.lens.device)
        self.cache, self.slots = cache, cache.slots_of(nodes)
        self.fresh = ancestors is None and cache.bound == 0
        self.visible = min(cache.bound + offset + n, cache.slots)
        self.mask = None
        if self.fresh or (n == 1 and ancestors is None and cache.batch == 1):
            return
        if ancestors is None:
            ancestors = (nodes[:, None] >= nodes).expand(cache.batch, n, n)
        self.mask = packed_mask(tree_mask(cache.lens, ancestors, self.visible), groups)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B,n,heads,Dh], k and v [B,n,K,Dh] -> [B,n,heads*Dh]; k and v are stored."""
        self.cache.write(layer, self.slots, k, v)
        if self.fresh:
            return attend_causal(q, k, v)
        return attend(q, *self.cache.read(layer, self.visible), self.mask)
