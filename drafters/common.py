"""What all recurrent drafters share: one transformer layer over its own cache, fed with the target's features at
committed positions and with its own output at drafted ones; and the same layer unrolled for training.

Conventions (EAGLE, SafeAILab/EAGLE `cnets.py`): draft position t holds the feature of token t and the embedding of
token t+1 and predicts token t+2. Its RoPE position is t. A node drafted on level l has position lens + l - 1.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafters.vocab import DraftVocab
from specdec.attention import CacheView, document_mask, document_positions
from specdec.cache import KVCache, cache_bytes
from specdec.layers import Linear, LinearMap, RMSNorm, Rope, RopeTable, check_heads, hold, release, rotate
from specdec.types import DraftState, UnrolledState

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


def start(drafter: nn.Module, target, init: str) -> None:
    """Random weights, on the target's device; `init` 'target' then lets the drafter repeat what the target said one
    token before (`start_from`), 'random' leaves it at that. Parameters are fp32 whatever the target is."""
    if init not in ("target", "random"):
        raise ValueError(f"init must be 'target' or 'random', got {init!r}")
    drafter.to(target.embed.weight.device)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if init == "target":
            drafter.start_from(target)


class DraftAttention(nn.Module):
    """Attention of the draft layer: fused q, k, v over an input of any width."""

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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q_rows = self.heads * (2 if self.gate else 1)
        rows = self.qkv(x).view(*x.shape[:2], q_rows + 2 * self.kv_heads, self.head_dim)
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
        return self.o(out * gate.flatten(2).sigmoid() if self.gate else out)


class SharedHead(LinearMap):
    """Rows of a head that is not the drafter's to train: logits over its draft vocabulary."""

    def __init__(self, weight: Tensor, ids: Tensor | None):
        """weight [V,H]; ids [U] of the rows to keep, or None for all, which are then shared and not copied."""
        super().__init__()
        rows = weight.detach() if ids is None else weight.detach()[ids.to(weight.device)]
        self.register_buffer("weight", rows, persistent=False)
        self.bias = None


def restrict(drafter: nn.Module, ids: Tensor) -> None:
    """FR-Spec (arXiv 2502.14856): let a drafter with a `head`, or `heads`, propose only these target tokens [U'], in
    this order; of those that it does not know, none. What is verified, and emitted, does not change."""
    old, heads = drafter.vocab, drafter.heads if hasattr(drafter, "heads") else [drafter.head]
    chosen = DraftVocab(old.target_size, ids.to(heads[0].weight.device))
    rows = old.from_target(chosen.ids)
    rows = rows[rows >= 0]
    if not len(rows):
        raise ValueError("the token map and the drafter's own vocabulary have no token in common")
    chosen = DraftVocab(old.target_size, old.to_target(rows))
    smaller = nn.ModuleList(SharedHead(head.weight, rows) for head in heads)
    if hasattr(drafter, "heads"):
        drafter.heads = smaller
    else:
        drafter.head = smaller[0]
    drafter.vocab = chosen


class RecurrentDrafter(nn.Module):
    """A drafter of one layer applied again and again. A subclass says how features enter (`fuse`), what the layer is
    (`layer`), and has a `head`, which makes logits of what `readout` makes of the layer's output; cache, positions and
    training unroll live here.

    `layers` of them may differ: then level l is drafted by layer min(l, layers - 1), every layer absorbs the committed
    positions as the first does, and sees of the drafted ones those that went through itself.
    """

    head: nn.Linear | SharedHead
    capturable = True

    def __init__(
        self,
        shape: DraftShape,
        taps: tuple[int, ...],
        vocab: DraftVocab,
        embedding: Tensor,
        layers: int = 1,
        rotary_dim: int | None = None,
    ):
        """embedding [V,H]: the target's, shared and frozen. rotary_dim: see `DraftAttention`."""
        super().__init__()
        self.shape, self.taps, self.vocab, self.layers = shape, tuple(taps), vocab, layers
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.rope = RopeTable(shape.rope, rotary_dim or shape.head_dim)
        self.max_steps: int | None = None
        self.cache: KVCache | None = None
        # [B,T] for the next `unroll`: rows hold several texts, equal numbers stand together; None: one text each
        self.documents: Tensor | None = None
        self.recompute = False  # while training, keep only what enters and leaves a layer (activation checkpointing)

    @abstractmethod
    def fuse(self, feats: Tensor) -> Tensor:
        """Features of the target [B,n,F] -> the layer's hidden input [B,n,H]."""

    @abstractmethod
    def layer(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, index: int) -> Tensor:
        """One draft position each: embeddings and hidden input [B,n,H] -> hidden output [B,n,H], fed back as it is.

        index: which of the drafter's layers, always 0 for a drafter of one."""

    def readout(self, hidden: Tensor, index: int) -> Tensor:
        """Hidden output of layer `index` -> what the head reads, [B,n,H]; the same unless a norm stands between."""
        return hidden

    def predict(self, hidden: Tensor, index: int) -> Tensor:
        """Hidden output [B,n,H] of layer `index` -> logits [B,n,U]."""
        return self.head(self.readout(hidden, index))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [B,n,H] of tokens at draft positions [B,n]."""
        return F.embedding(tokens, self.embedding)

    # Decoding

    def reset(self, batch: int, slots: int, first: Tensor) -> None:
        shape = self.shape
        hold(self)
        self.rope.reserve(slots, self.embedding)
        self.cache = KVCache(self.layers, batch, slots, shape.kv_heads, shape.head_dim, like=self.embedding)

    def cache_bytes(self, batch: int, slots: int) -> int:
        return cache_bytes(self.layers, batch, slots, self.shape.kv_heads, self.shape.head_dim, self.embedding)

    def extend(self, feats: Tensor, tokens: Tensor, n: Tensor, bound: int) -> DraftState:
        count = tokens.shape[1]
        cache = self.cache
        view = CacheView(cache, count, None, self.shape.heads // self.shape.kv_heads)
        positions = cache.lens[:, None] + torch.arange(count, device=tokens.device)
        feats = feats.to(self.embedding.dtype)  # the drafter's may be narrower than the target's
        rope, embeds, hidden = self.rope(positions), self.embed(tokens, positions), self.fuse(feats)
        for index in range(1, self.layers):
            self.layer(embeds, hidden, rope, partial(view.attend, index), index)
        hidden = self.layer(embeds, hidden, rope, partial(view.attend, 0), 0)
        last = (n - 1).clamp_(min=0)  # n is 0 for rows that are finished: their state does not matter
        hidden = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1]))
        cache.advance(n, bound)
        return DraftState(self.predict(hidden, 0), hidden)

    def keep(self, index: Tensor) -> None:
        self.cache.keep(index)

    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        b, n = tokens.shape
        index = min(level, self.layers - 1)
        first = max(index, 1)  # the first level whose nodes went through this layer
        own = ancestors[:, :, (first - 1) * n :]
        view = CacheView(self.cache, n, own, self.shape.heads // self.shape.kv_heads, offset=(level - first) * n)
        positions = (self.cache.lens[:, None] + (level - 1)).expand(b, n)  # all nodes of a level at one
        embeds = self.embed(tokens, positions)
        hidden = self.layer(embeds, hidden, self.rope(positions), partial(view.attend, index), index)
        return DraftState(self.predict(hidden, index), hidden)

    # Training

    def unroll(
        self, feats: Tensor, tokens: Tensor, steps: int, needed: Tensor | None = None
    ) -> Iterator[UnrolledState]:
        """Training-time test (EAGLE-3, arXiv 2503.01840, section 3): step j feeds step j-1's output back, one token on.

        feats [B,T,F], tokens [B,T] one position later (token t+1 beside feature t). Row t of step j stands for the
        decoder's level j after the prefix 0..t: position t+j, keys of step 0 at rows <= t and its own of steps 1..j.
        needed [B,T]: the rows that are wanted of the steps after the first, where all others are 0. No row looks at
        another one's later steps, so that changes nothing of the wanted ones.
        """
        b, t = tokens.shape
        release(self)
        self.rope.reserve(t + steps, self.embedding)
        documents = self.documents if self.documents is not None else tokens.new_zeros(b, t)
        some = None if needed is None or steps == 1 else Rows(needed)
        rows, seen = document_positions(documents), document_mask(documents)
        attention = [UnrolledAttention(seen, some) for _ in range(self.layers)]
        layer = partial(recomputed, self.layer) if self.recompute else self.layer
        hidden = context = self.fuse(feats)
        for j in range(steps):
            index = min(j, self.layers - 1)
            if 0 < index == j:  # the first call of this layer: what it sees of the committed positions
                layer(self.embed(tokens, rows), context, self.rope(rows), attention[j], j)
            ahead, positions = F.pad(tokens[:, j:], (0, min(j, t))), rows + j
            if j and some:
                ahead, positions = some.of(ahead), some.of(positions)
                hidden = some.of(hidden) if j == 1 else hidden
            hidden = layer(self.embed(ahead, positions), hidden, self.rope(positions), attention[index], index)
            readout = self.readout(hidden, index)
            whole = (some.spread(hidden), some.spread(readout)) if j and some else (hidden, readout)
            yield UnrolledState(*whole, self.head.weight)


class Rows:
    """Some rows of a batch, as a batch of one long row."""

    def __init__(self, chosen: Tensor) -> None:
        """chosen [B,T]"""
        self.shape, self.at = chosen.shape, chosen.flatten().nonzero()[:, 0]

    def of(self, x: Tensor) -> Tensor:
        """[B,T,...] -> [1,n,...]"""
        return x.flatten(0, 1).index_select(0, self.at)[None]

    def spread(self, x: Tensor) -> Tensor:
        """[1,n,...] -> [B,T,...], 0 where no row is."""
        whole = x.new_zeros(self.shape.numel(), *x.shape[2:])
        return whole.index_copy(0, self.at, x[0]).unflatten(0, self.shape)


class UnrolledAttention:
    """Attention of the unrolled layer: over the keys of the first call that `seen` [B,T,T] shows, and over each later
    call's own row. `seen` is causal, so keys behind a block of queries are not looked at. Later calls may come with
    `some` of the rows only."""

    BLOCK = 128  # queries

    def __init__(self, seen: Tensor, some: Rows | None = None) -> None:
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        self.some = some
        self.bias = bias[:, None, None]  # added: unlike masked_fill, that costs the backward pass nothing
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.some is None or not self.keys:
            return self._call(q, k, v)
        return self.some.of(self._call(*map(self.some.spread, (q, k, v))))

    def _call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        b, t, heads, dim = q.shape
        q = q.view(b, t, k.shape[2], heads // k.shape[2], dim) * dim**-0.5
        own = None
        if len(self.keys) > 1:  # [B,T,j,K,Dh] of the later calls
            own = torch.stack(self.keys[1:], dim=2), torch.stack(self.values[1:], dim=2)
        blocks = [slice(start, min(start + self.BLOCK, t)) for start in range(0, t, self.BLOCK)]
        out = [self._attend(q[:, rows], rows, own and tuple(x[:, rows] for x in own)) for rows in blocks]
        return torch.cat(out, dim=1).reshape(b, t, heads * dim)

    def _attend(self, q: Tensor, rows: slice, own: tuple[Tensor, Tensor] | None) -> Tensor:
        """q [B,n,K,G,Dh] of these rows, own keys and values [B,n,j,K,Dh] -> [B,n,K,G,Dh]"""
        end = rows.stop
        keys, values = self.keys[0][:, :end], self.values[0][:, :end]
        scores = torch.einsum("bnkgd,bskd->bkgns", q, keys).float() + self.bias[..., rows, :end]
        if own is None:
            return torch.einsum("bkgns,bskd->bnkgd", scores.softmax(-1).to(values.dtype), values)
        later = torch.einsum("bnkgd,bnjkd->bkgnj", q, own[0]).float()
        weights = torch.cat([scores, later], dim=-1).softmax(-1).to(values.dtype)
        first, later = weights.split([end, later.shape[-1]], dim=-1)
        out = torch.einsum("bkgns,bskd->bnkgd", first, values)
        return out + torch.einsum("bkgnj,bnjkd->bnkgd", later, own[1])


def recomputed(
    layer: Callable, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: UnrolledAttention, index: int
) -> Tensor:
    """`layer` whose activations are computed anew in the backward pass, but for its own key and value."""

    def run(embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        again = copy(earlier)  # this runs twice, and must leave no trace
        again.keys, again.values = [*earlier.keys], [*earlier.values]
        out = layer(embeds, hidden, rope, again, index)
        return out, again.keys[-1], again.values[-1]

    earlier = copy(attend)
    earlier.keys, earlier.values = [*attend.keys], [*attend.values]
    out, key, value = checkpoint(run, embeds, hidden, use_reentrant=False, preserve_rng_state=False)
    attend.keys.append(key)
    attend.values.append(value)
    return out
