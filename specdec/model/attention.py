"""Attention over a cache or over whole texts, and the masks that it needs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from specdec.model.cache import KVCache
from specdec.model.layers import Freezable, Linear, RMSNorm
from specdec.ops.attention import attend_add, attend_causal, attend_grouped, tree_attention
from specdec.ops.rope_write import rope_write, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B,n,heads,Dh], k, v [B,n,K,Dh] -> [B,n,heads*Dh]


def document_positions(documents: Tensor) -> Tensor:
    """Return positions within documents: documents [B,T], adjacent equal numbers are one document -> [B,T]."""
    rows = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return rows - (rows * begins).cummax(1).values


def document_mask(documents: Tensor) -> Tensor:
    """Return the causal mask within documents: [B,T] -> [B,T,T] bool, True where t sees s."""
    rows = torch.arange(documents.shape[1], device=documents.device)
    return (documents[:, :, None] == documents[:, None]) & (rows[:, None] >= rows)


class NoCache:
    """Attention without a cache, for training: causal, or by a mask."""

    def __init__(self, window: int | None = None, scale: float | None = None, mask: Tensor | None = None):
        """Attend within `window` positions if given, and if a mask [B,T,T] bool is given, where it is True."""
        self.window, self.scale, self.mask = window, scale, mask
        if mask is not None and window is not None:
            self.mask = mask & mask.new_ones(mask.shape[1:]).triu(1 - window)

    def layer(self, index: int) -> Attend:
        """Return the `Attend` of a layer."""
        return partial(self.attend, index)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention [B,T,heads*Dh] of q [B,T,heads,Dh] over k and v [B,T,K,Dh]."""
        if self.mask is None:
            return attend_causal(q, k, v, self.window, self.scale)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend_grouped(q, k, v, self.mask[:, None], scale=self.scale).transpose(1, 2).flatten(2)


class CacheView:
    """Where n new positions go in the cache, and what each of them sees. Layers of one kind share it in a forward.

    The new positions take the scratch slots from lens + offset on. All committed slots are visible, except those
    `window` or more positions before the new one. Scratch slots before `offset` are assumed to be as deep as the new
    ones.

    The rows of a prefill are empty, so it attends to its own positions only.
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
        """Take the n scratch slots after `offset`, for n new positions per row.

        ancestors [B,n,offset+n] bool: the scratch slots that each position sees, itself included; None: causal.
        groups: query heads per key head. offset: scratch slots that an earlier forward has filled. prefill: the rows
        are empty. depth [B,n]: position after the committed length; needed with a window. window: positions that a
        layer sees; None for all. scale: factor of the scores; None for 1 / sqrt(Dh). slots [B*n]: flat indices of the
        new positions, if the caller has them.
        """
        self.cache, self.scale, self.fresh, self.seen = cache, scale, prefill, None
        self.slots = cache.slots_of(cache.places[offset : offset + n]) if slots is None else slots
        # No position exceeds its slot, so a window of all visible slots hides nothing.
        hides = window is not None and window < min(cache.max_len + offset + n, cache.slots)
        self.window = window if hides else None
        if not prefill:
            self.attention, self.seen = tree_attention(
                cache.layers[0], cache.lens, cache.places, n, offset + n, ancestors, depth, cache.max_len, groups,
                self.window, scale, cache.exact,
            )  # fmt: skip

    def layer(self, index: int) -> "CacheView":
        """Switch the view to a layer and return it.

        Until the next call it is the `Attend` of this layer. One object for all layers takes less time in small models.
        """
        self.index, self.flat, self.heads = index, self.cache.flat[index], self.cache.heads[index]
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, and return the attention of q."""
        self.cache.write(self.index, self.slots, k, v)
        return attend_causal(q, k, v, self.window, self.scale) if self.fresh else self.attention(q, *self.heads)

    def of_rows(self, rows: Tensor, rope: tuple[Tensor, Tensor], write: Callable[..., Tensor]) -> Tensor:
        """Attend from rows [B*n,heads+2K,Dh] of unrotated q, k and v, with the rotation of `rope_write`."""
        q = write(rows, *rope, self.slots, *self.flat)
        if self.fresh:  # a prompt attends to its own positions
            k, v = self.cache.layers[self.index][:, :, : q.shape[1]]
            return attend_causal(q, k, v, self.window, self.scale)
        return self.attention(q, *self.heads)


class Attention(Freezable):
    """Grouped-query self-attention over x [B*n,H] or [B,n,H]; one matrix computes q, k and v, rows in this order."""

    adds: dict[RMSNorm, Callable[..., tuple[Tensor, Tensor]]]  # by the norm that follows, while the module is frozen

    def __init__(
        self,
        shape: Any,
        width: int,
        bias: bool = False,
        qk_norm: bool = False,
        gate: bool = False,
        rotary_dim: int | None = None,
        *,
        o_bias: bool = False,
        norm: type[RMSNorm] = RMSNorm,
    ):
        """Create the projections of x of size `width` and, with `qk_norm`, the norms of the heads of q and k.

        shape: has `hidden`, `heads`, `kv_heads`, `head_dim` and `eps`. gate: each query head has a gate of its size for
        the head's output (Qwen3-Next). rotary_dim: number of a head's dimensions that are rotated (GLM-4.5,
        Qwen3-Next); None for all.
        """
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.gate, self.rotary_dim = gate, rotary_dim or shape.head_dim
        rows = shape.heads * (2 if gate else 1) + 2 * shape.kv_heads
        self.qkv = Linear(width, rows * shape.head_dim, bias=bias)
        self.o = Linear(shape.heads * shape.head_dim, shape.hidden, bias=o_bias)
        self.q_norm = norm(shape.head_dim, shape.eps) if qk_norm else None
        self.k_norm = norm(shape.head_dim, shape.eps) if qk_norm else None

    @property
    def whole(self) -> bool:
        """Return whether heads are rotated as a whole and have no gates, as fused operators require."""
        return not self.gate and self.rotary_dim == self.head_dim

    @override
    def freeze(self) -> None:
        super().freeze()
        self.adds = {}

    @override
    def bind(self) -> Callable[..., Tensor]:
        """Return the function (x, rope, attend) -> attention(x)."""
        return self._bind(self.qkv.bind(), self.o.bind())

    @override
    def forward(self, *inputs: Any) -> Tensor:
        if self.frozen is None and torch.is_grad_enabled():  # autocast keeps what it makes of a module's weight
            return self._bind(self.qkv, self.o)(*inputs)
        return super().forward(*inputs)

    def _bind(self, qkv: Callable[[Tensor], Tensor], o: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        dim, spread = self.head_dim, self._bind_heads()
        write = rope_write(self.qkv.weight, self.q_norm, self.k_norm) if self.whole else None

        def attention(x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
            rows = qkv(x if x.ndim == 2 else x.flatten(0, -2))
            if write is not None and isinstance(attend, CacheView):
                out = attend.of_rows(rows.unflatten(-1, (-1, dim)), rope, write)
            else:
                out = spread(rows.view(*rope[0].shape[:2], rows.shape[-1] // dim, dim), rope, attend)
            out = o(out.flatten(0, 1))
            return out if x.ndim == 2 else out.view(*x.shape[:-1], out.shape[-1])

        return attention

    def _bind_heads(self) -> Callable[..., Tensor]:
        """Return the function between the two products: q, k and v [B,n,heads,Dh] -> [B,n,heads*Dh]."""
        heads, kv_heads, gated, some = self.heads, self.kv_heads, self.gate, self.rotary_dim
        q_norm, k_norm = (norm and norm.bind() for norm in (self.q_norm, self.k_norm))
        q_rows, part = heads * (2 if gated else 1), some < self.head_dim

        def attention(rows: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
            if q_norm is None and not gated:
                qk, v = rows.split_with_sizes([heads + kv_heads, kv_heads], dim=2)
            else:
                q, k, v = rows.split_with_sizes([q_rows, kv_heads, kv_heads], dim=2)
                if gated:
                    q, gate = q.unflatten(2, (heads, 2)).unbind(3)
                if q_norm is not None and k_norm is not None:
                    q, k = q_norm(q), k_norm(k)
                qk = torch.cat([q, k], dim=2)
            turned = rotate(qk[..., :some] if part else qk, *rope)
            qk = torch.cat([turned, qk[..., some:]], dim=-1) if part else turned
            q, k = qk.split_with_sizes([heads, kv_heads], dim=2)
            out = attend(q, k, v)
            return out * gate.flatten(2).sigmoid() if gated else out

        return attention

    def add(
        self, residual: Tensor, x: Tensor, norm: RMSNorm, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return residual + attention(x), and its norm."""
        if self.frozen is None:
            return norm(self(x, rope, attend), residual)
        if norm not in self.adds:
            self.adds[norm] = self.bind_add(norm)
        return self.adds[norm](residual, x, rope, attend)

    def bind_add(self, norm: RMSNorm) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the function (residual, x, rope, attend) -> residual + attention(x), and its norm."""
        attention, add_norm = self.frozen or self.bind(), norm.bind()
        own = attend_add(self.qkv, self.o, self.q_norm, self.k_norm, norm) if self.whole else None

        def add(residual: Tensor, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> tuple[Tensor, Tensor]:
            if own is not None and attend.__class__ is CacheView and attend.seen is not None and x.ndim == 2:
                return own(residual, x, rope, attend.slots, attend.flat, attend.heads, attend.seen)
            return add_norm(attention(x, rope, attend), residual)

        return add
