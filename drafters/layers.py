"""What drafters are made of: the shape of a draft layer, its attention, a head that is shared, fresh weights."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.contracts import Drafter, DraftState
from specdec.drafters.vocab import DraftVocab
from specdec.model.attention import CacheView, bind_add, bind_write
from specdec.model.cache import KVCache
from specdec.model.layers import Freezable, GatedMLP, Linear, LinearMap, RMSNorm, check_heads
from specdec.model.rope import Rope, rotate
from specdec.ops import kernel_for, native

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B,n,heads,Dh], k, v [B,n,K,Dh] -> [B,n,heads*Dh]


@dataclass(frozen=True)
class DraftShape:
    """The shape of a draft layer. `hidden` is the draft's own, and the width of the target's embeddings."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    context: int = 2048

    def __post_init__(self) -> None:
        check_heads(self.heads, self.kv_heads)


def shape_like(
    target,
    *,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    rope_theta: float | None = None,
) -> DraftShape:
    """The shape of a fresh drafter for a target; what is not given is the target's, its rope included."""
    config = target.config
    heads = num_attention_heads or config.heads
    return DraftShape(
        hidden=config.hidden,
        intermediate=intermediate_size or config.intermediate,
        heads=heads,
        kv_heads=num_key_value_heads or min(config.kv_heads, heads),
        head_dim=config.head_dim,
        eps=config.eps,
        rope=config.rope if rope_theta is None else Rope(rope_theta),
        context=config.context,
    )


def split_sizes(target, settings: Mapping[str, Any], **sizes) -> tuple[DraftShape, dict[str, Any]]:
    """Split the settings of a `create` function into the shape that `shape_like` makes of its sizes, and the rest."""
    names = inspect.signature(shape_like).parameters
    given = {name: value for name, value in settings.items() if name in names}
    return shape_like(target, **sizes, **given), {k: v for k, v in settings.items() if k not in given}


def start(drafter: nn.Module, target, init: str) -> None:
    """Random weights, on the target's device; `init` 'target' then lets the drafter repeat what the target said one
    token before (`start_from`), 'random' leaves it at that. Parameters are fp32 whatever the target is."""
    if init not in ("target", "random"):
        raise ValueError(f"init must be 'target' or 'random', got {init!r}")
    drafter.to(target.device)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if init == "target":
            drafter.start_from(target)


class CachedAttention:
    """Attention over layer `layer` of a cache, in which the new keys and values are stored."""

    def __init__(self, view: CacheView, layer: int):
        self.view, self.layer = view, layer

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.view.attend(self.layer, q, k, v)

    def of_rows(self, rows: Tensor, rope: tuple[Tensor, Tensor], write: Callable[..., Tensor]) -> Tensor:
        """The same from rows [B*n,heads+2K,Dh] of q, k and v that are not rotated yet, by what `bind_write` gave."""
        return self.view.attend_rows(self.layer, rows, rope, write)


def side_by_side(first: RMSNorm, second: RMSNorm, x: Tensor, y: Tensor) -> Tensor:
    """The norms of x and y [B,n,H] -> [B,n,2H]."""
    if x.dtype == y.dtype and (kernel := kernel_for("norm_pair", x)):
        return kernel(x, y, (first.weight, second.weight), (first.eps, second.eps))
    if native.serves(x) and native.serves(y):
        pair = torch.ops.specdec_rows.norm_pair.default._op
        return pair(x, y, first.weight, second.weight, first.eps, second.eps)
    return torch.cat([first(x), second(y)], dim=-1)


def bind_pair(first: RMSNorm, second: RMSNorm) -> Callable[[Tensor, Tensor], Tensor]:
    """`side_by_side` of these norms, as a function of x and y, which are of the norms' dtype."""
    if kernel_for("norm_pair", first.weight) or not (native.serves(first.weight) and native.serves(second.weight)):
        return partial(side_by_side, first, second)
    pair, what = torch.ops.specdec_rows.norm_pair.default._op, (first.weight, second.weight, first.eps, second.eps)
    return lambda x, y: pair(x, y, *what)


class DraftAttention(Freezable):
    """Attention of the draft layer: fused q, k, v over an input of any width."""

    frozen_add: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __init__(
        self,
        shape: DraftShape,
        width: int,
        bias: bool = False,
        qk_norm: bool = False,
        gate: bool = False,
        rotary_dim: int | None = None,
    ):
        """gate: each query head is followed by a gate of its size for the head's output (Qwen3-Next). rotary_dim: only
        so many of a head's dimensions are rotated (GLM-4.5, Qwen3-Next)."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.gate, self.rotary_dim = gate, rotary_dim or shape.head_dim
        rows = shape.heads * (2 if gate else 1) + 2 * shape.kv_heads
        self.qkv = Linear(width, rows * shape.head_dim, bias=bias)
        self.o = Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps) if qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.eps) if qk_norm else None

    @property
    def whole(self) -> bool:
        """Heads are rotated as a whole, and have no gates: calls of several operators know no others."""
        return not self.gate and self.rotary_dim == self.head_dim

    def freeze(self) -> None:
        super().freeze()
        self.frozen_add = bind_add(self.qkv, self.o, self.q_norm, self.k_norm) if self.whole else None

    def unfreeze(self) -> None:
        super().unfreeze()
        self.frozen_add = None

    def add(
        self, residual: Tensor, x: Tensor, norm: RMSNorm, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """residual + attention(x), and its norm."""
        if self.frozen_add is not None and isinstance(attend, CachedAttention) and x.ndim == 2 and attend.view.seen:
            return self.frozen_add(residual, x, norm, rope, attend.view, attend.layer)
        return norm.add(residual, self(x, rope, attend))

    def bind(self) -> Callable[..., Tensor]:
        write = bind_write(self.qkv.weight, self.q_norm, self.k_norm) if self.whole else None
        if write is None:
            return self._attention

        qkv, o, dim = self.qkv.bind(), self.o.bind(), self.head_dim

        def attention(x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
            if not isinstance(attend, CachedAttention):
                return self._attention(x, rope, attend)
            rows = qkv(x if x.ndim == 2 else x.flatten(0, -2))
            out = o(attend.of_rows(rows.view(len(rows), -1, dim), rope, write).flatten(0, -2))
            return out if x.ndim == 2 else out.view(*x.shape[:-1], -1)

        return attention

    def _attention(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q_rows = self.heads * (2 if self.gate else 1)
        rows = self.qkv(x).view(*rope[0].shape[:2], q_rows + 2 * self.kv_heads, self.head_dim)
        q, k, v = rows.split_with_sizes([q_rows, self.kv_heads, self.kv_heads], dim=2)
        if self.gate:
            q, gate = q.unflatten(2, (self.heads, 2)).unbind(3)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        qk = torch.cat([q, k], dim=2) if self.gate or self.q_norm is not None else rows[:, :, : q_rows + self.kv_heads]
        turned = rotate(qk[..., : self.rotary_dim], *rope)
        if self.rotary_dim < self.head_dim:
            turned = torch.cat([turned, qk[..., self.rotary_dim :]], dim=-1)
        q, k = turned.split_with_sizes([self.heads, self.kv_heads], dim=2)
        out = attend(q, k, v)
        out = self.o(out * gate.flatten(2).sigmoid() if self.gate else out)
        return out.flatten(0, 1) if x.ndim == 2 else out


class DraftLayer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, shape: DraftShape, attention: DraftAttention):
        super().__init__()
        self.input_norm = RMSNorm(shape.hidden, shape.eps)
        self.attention = attention
        self.post_norm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = GatedMLP(shape.hidden, shape.intermediate)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x, normed = self.attention.add(x, self.input_norm(x), self.post_norm, rope, attend)
        return x + self.mlp(normed)


class SharedHead(LinearMap):
    """Rows of a head that is not the drafter's to train: logits over its draft vocabulary."""

    def __init__(self, weight: Tensor, ids: Tensor | None):
        """weight [V,H]; ids [U] of the rows to keep, or None for all, which are then shared and not copied."""
        super().__init__()
        rows = weight.detach() if ids is None else weight.detach()[ids.to(weight.device)]
        self.register_buffer("weight", rows, persistent=False)
        self.bias = None


class SumHead:
    """Heads without biases over the parts of one input, whose logits are added. For training."""

    bias = None

    def __init__(self, *heads: LinearMap):
        """heads: of widths [U,H1], [U,H2], ..."""
        self.heads = heads

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple(weight for head in self.heads for weight in head.weights)

    def __call__(self, x: Tensor) -> Tensor:
        """[...,H1+H2+...] -> [...,U]"""
        return sum(self.parts(x))

    def parts(self, x: Tensor) -> list[Tensor]:
        """[...,H1+H2+...] -> what is added, [...,U] each."""
        parts = x.split([head.weight.shape[1] for head in self.heads], -1)
        return [F.linear(part, head.weight) for head, part in zip(self.heads, parts, strict=True)]


class CachedDrafter(Drafter):
    """A drafter with a head and a cache. A subclass says how it absorbs committed positions (`absorb`)."""

    head: LinearMap
    capturable = True
    learns = True

    @abstractmethod
    def absorb(
        self, cache: KVCache, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int, prefill: bool = False
    ) -> DraftState:
        """Do what `extend` says, in `cache`, which `prefill` says holds nothing yet."""

    def heads_in_use(self) -> list[LinearMap]:
        return [self.head]

    def set_heads(self, heads: list[LinearMap]) -> None:
        (self.head,) = heads

    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        part = self.cache.admit(row, len(first), tokens.shape[1])
        return self.absorb(part, feats, tokens, n, tokens.shape[1], prefill=True)

    def extend(self, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        return self.absorb(self.cache, feats, tokens, n, max_len)


def restrict(drafter: Drafter, ids: Tensor) -> None:
    """FR-Spec (arXiv 2502.14856): let a drafter with heads propose only these target tokens [U'], in this order; of
    those that it does not know, none. What is verified, and emitted, does not change."""
    old, heads = drafter.vocab, drafter.heads_in_use()
    if not heads:
        raise ValueError(f"{type(drafter).__name__} has no head that a token map could cut")
    chosen = DraftVocab(old.target_size, ids.to(heads[0].weight.device))
    rows = old.from_target(chosen.ids)
    rows = rows[rows >= 0]
    if not len(rows):
        raise ValueError("the token map and the drafter's own vocabulary have no token in common")
    drafter.set_heads([SharedHead(head.weight, rows) for head in heads])
    drafter.vocab = DraftVocab(old.target_size, old.to_target(rows))
