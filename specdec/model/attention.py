"""Attention of a few new positions over a cache: one function for decoding, trees and prefill."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.model.cache import KVCache
from specdec.model.layers import Linear, RMSNorm
from specdec.ops import kernel_for, native
from specdec.ops.cpu_attention import attend_add, attend_seen, seen_by


def tree_mask(lens: Tensor, ancestors: Tensor, slots: int) -> Tensor:
    """Key slot s is visible to node i iff s < lens or ancestors[i, s - lens].

    lens [B], ancestors [B,N,M] (bool, M scratch slots) -> [B,N,slots] bool.
    """
    b, n, m = ancestors.shape
    slot, end = torch.arange(slots, device=lens.device), lens[:, None]
    committed = (slot < end)[:, None].expand(b, n, slots)
    scratch = (end + slot[:m]).clamp_(max=slots - 1)  # a row that is finished may lie behind all slots
    return committed.scatter(2, scratch[:, None].expand(b, n, m), ancestors)


def causal_mask(lens: Tensor, nodes: Tensor, slots: int) -> Tensor:
    """The same where nodes [n], counted from lens, see all before them and themselves: -> [B,n,slots] bool."""
    return torch.arange(slots, device=lens.device) <= (lens[:, None] + nodes)[..., None]


def window_mask(lens: Tensor, depth: Tensor, slots: int, window: int) -> Tensor:
    """Key slot s is at most window - 1 positions behind node i: lens [B], depth [B,N] -> [B,N,slots] bool.

    A committed slot holds its own position, node j's slot the position lens + depth[j].
    """
    offset = torch.arange(slots, device=lens.device) - lens[:, None]  # [B,S]
    behind = depth.gather(1, offset.clamp(0, depth.shape[1] - 1))
    position = torch.where(offset < 0, offset, behind)  # counted from lens
    return position[:, None] > depth[..., None] - window


def packed_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """mask [B,N,S] bool -> what is added to scores, [B,1,groups*N,S]: 0 where visible, else -inf; the same for each of
    the query heads that share a key head. Given a bool mask, torch's attention makes this anew in every layer."""
    added = torch.full(mask.shape, -torch.inf, dtype=dtype, device=mask.device).masked_fill_(mask, 0.0)
    return torch.cat([added] * groups, 1).unsqueeze(1)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """q [B,N,heads,Dh] over keys and values [B,K,S,Dh] -> [B,N,heads*Dh].

    mask [B,1,groups*N,S], from `packed_mask`, or None if every slot is visible to every node. The query heads that
    share a key head are packed along the node axis, so keys and values are never repeated. scale multiplies the
    products of q and keys; None is Dh ** -0.5.
    """
    b, n, heads, dim = q.shape
    kv_heads = keys.shape[1]
    if n == 1:  # the same as below without five views, which take as long as the attention itself on the CPU
        q = q.view(b, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(b, 1, heads * dim)
    groups = heads // kv_heads
    packed = q.view(b, n, kv_heads, groups, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, groups * n, dim)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    return out.view(b, kv_heads, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(b, n, heads * dim)


def shares_key_heads(q: Tensor, masked: bool) -> bool:
    """Does torch's attention take queries [...,Dh] that share key heads without holding all their scores?

    On a GPU only flash attention does, and it takes neither fp32 nor a mask nor wide heads. For the others torch falls
    back to plain attention (https://github.com/pytorch/pytorch/pull/181528), so keys and values are repeated there.
    """
    return not q.is_cuda or not (masked or q.dtype == torch.float32 or q.shape[-1] > 256)


def attend_grouped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """torch's attention of q [B,heads,N,Dh] over k and v [B,K,S,Dh], heads/K query heads to a key head."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and not shares_key_heads(q, mask is not None):
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None) -> Tensor:
    """Self-attention of a fresh prompt: q [B,T,heads,Dh], k and v [B,T,K,Dh] -> [B,T,heads*Dh].

    With a window a position sees itself and the window - 1 before it.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    length = q.shape[2]
    if window is None or window >= length:
        return attend_grouped(q, k, v, causal=True, scale=scale).transpose(1, 2).flatten(2)
    pieces = []  # as many queries at once as the window is long, so that a mask never has T x T entries
    for start in range(0, length, window):
        first, end = max(0, start - window + 1), min(start + window, length)
        rows = torch.arange(start, end, device=q.device)[:, None]
        columns = torch.arange(first, end, device=q.device)
        mask = (columns <= rows) & (columns > rows - window)
        piece = q[:, :, start:end], k[:, :, first:end], v[:, :, first:end]
        pieces.append(attend_grouped(*piece, mask, scale=scale))
    return torch.cat(pieces, 2).transpose(1, 2).flatten(2)


def document_positions(documents: Tensor) -> Tensor:
    """Positions of tokens within their own documents: documents [B,T], equal numbers standing together -> [B,T]."""
    rows = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return rows - (rows * begins).cummax(1).values


def document_mask(documents: Tensor) -> Tensor:
    """Position t sees s iff s <= t and both are of one document: documents [B,T] -> [B,T,T] bool."""
    rows = torch.arange(documents.shape[1], device=documents.device)
    return (documents[:, :, None] == documents[:, None]) & (rows[:, None] >= rows)


def bind_write(weight: Tensor, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Callable[..., Tensor] | None:
    """What norms and rotates q and k and stores k and v in one pass: (rows, cos, sin, slots, keys, values) -> q, the
    kernel `rope_write` or our own operator. None where there is neither. weight: that of q, k and v."""
    if kernel := kernel_for("rope_write", weight):
        if q_norm is None:
            return kernel
        gains = torch.stack([q_norm.weight, k_norm.weight])
        return partial(kernel, gains=gains, eps=q_norm.eps, offset=q_norm.offset)
    return native.bound("rope_write", weight, *_gains(q_norm, k_norm))


def bind_add(
    qkv: Linear, o: Linear, q_norm: RMSNorm | None, k_norm: RMSNorm | None
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Attention and the norm behind it in one call (`cpu_attention.attend_add`): (residual, x, norm, rope, view, layer)
    -> residual + attention(x), and its norm. None where there is no such call. It serves views that have `seen`."""
    if kernel_for("rope_write", qkv.weight) or kernel_for("rms_norm", qkv.weight):
        return None
    add = attend_add(qkv, o, *_gains(q_norm, k_norm))
    if add is None:
        return None
    return lambda residual, x, norm, rope, view, layer: add(
        residual, x, norm.weight, norm.eps, rope, view.slots, view.cache.flat[layer], view.cache.heads[layer], view.seen
    )


def _gains(q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> tuple[Tensor | None, float]:
    """What normalised queries, and keys, are multiplied by [2,Dh], and the norms' eps."""
    return (None, 0.0) if q_norm is None else (torch.stack([q_norm.gain(), k_norm.gain()]), q_norm.eps)


class NoCache:
    """The view of a forward that keeps nothing: causal over its own positions, or, with a mask [B,T,T] bool, over what
    that shows of them. For training."""

    seen = None  # our own operators do not serve

    def __init__(self, window: int | None = None, scale: float | None = None, mask: Tensor | None = None):
        self.window, self.scale, self.mask = window, scale, mask
        if mask is not None and window is not None:
            self.mask = mask & mask.new_ones(mask.shape[1:]).triu(1 - window)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.mask is None:
            return attend_causal(q, k, v, self.window, self.scale)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend_grouped(q, k, v, self.mask[:, None], scale=self.scale).transpose(1, 2).flatten(2)


class CacheView:
    """What like layers of one forward share: where n new positions go in the cache, and what each of them sees.

    The new positions take the scratch slots from lens + offset on. ancestors [B,n,offset+n] bool tells which scratch
    slots each of them sees, itself included; None means causal. All committed slots are visible, except those that lie
    `window` or more positions behind. For that the depth [B,n] of the new positions must be known; scratch slots before
    `offset` are taken to lie as deep as the new ones. groups is the number of query heads to a key head,
    slots [B*n] where the new positions go, for a caller that knows it already.

    The rows of a prefill are empty, so it attends to its own positions only. A single causal position of a single row
    reads `max_len` slots without a mask: there, in plain decoding, `max_len` must be exact.
    """

    def __init__(
        self,
        cache: KVCache,
        n: int,
        ancestors: Tensor | None,
        groups: int,
        offset: int = 0,
        *,
        prefill: bool = False,
        depth: Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
        slots: Tensor | None = None,
    ):
        self.cache, self.scale, self.kernel, self.seen = cache, scale, None, None
        self.slots = cache.slots_of(cache.places[offset : offset + n]) if slots is None else slots
        self.fresh = prefill
        self.first, self.visible = 0, min(cache.max_len + offset + n, cache.slots)
        # No position exceeds its slot, so a window of all visible slots hides nothing.
        self.window = window if window is not None and window < self.visible else None
        self.mask = None
        if self.fresh:
            return
        if kernel := kernel_for("tree_attention", cache.layers[0]):
            self.kernel = partial(
                kernel,
                lens=cache.lens,
                ancestors=ancestors,
                nodes=offset + n,
                depth=None if ancestors is None else depth,
                window=self.window,
                scale=scale,
                slots=cache.max_len,
            )
            return
        if self.window is None and (seen := seen_by(cache.layers[0], cache.lens, n, offset + n, ancestors, scale)):
            self.seen = seen
            return
        if n == 1 and ancestors is None and cache.batch == 1:
            self.first = self.visible - (self.window or self.visible)
            return
        if ancestors is None:
            mask = causal_mask(cache.lens, cache.places[offset : offset + n], self.visible)
        else:
            mask = tree_mask(cache.lens, ancestors, self.visible)
        if self.window is not None:
            mask &= window_mask(cache.lens, depth, self.visible, self.window)
        self.mask = packed_mask(mask, groups, cache.layers[0].dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B,n,heads,Dh], k and v [B,n,K,Dh] -> [B,n,heads*Dh]; k and v are stored."""
        self.cache.write(layer, self.slots, k, v)
        return attend_causal(q, k, v, self.window, self.scale) if self.fresh else self._attend(layer, q)

    def attend_rows(
        self, layer: int, rows: Tensor, rope: tuple[Tensor, Tensor], write: Callable[..., Tensor]
    ) -> Tensor:
        """The same from rows [B*n,heads+2K,Dh] of q, k and v that are not rotated yet, by what `bind_write` gave."""
        q = write(rows, *rope, self.slots, *self.cache.flat[layer])
        if self.fresh:  # a prompt attends to its own positions
            return attend_causal(q, *self.cache.layers[layer][:, :, : q.shape[1]], self.window, self.scale)
        return self._attend(layer, q)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        if self.seen is not None:
            return attend_seen(q, *self.cache.heads[layer], self.seen)
        if self.kernel is not None:
            return self.kernel(q, *self.cache.heads[layer])
        return attend(q, *self.cache.read(layer, self.first, self.visible - self.first), self.mask, self.scale)
