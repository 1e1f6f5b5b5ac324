"""What all recurrent drafters share: one transformer layer over a cache of its own.

At committed positions it is fed with the target's features, at drafted ones with its own output. Training unrolls the
same layer.

Conventions (EAGLE, SafeAILab/EAGLE `cnets.py`): draft position t holds the feature of token t and the embedding of
token t+1 and predicts token t+2. Its RoPE position is t. A node drafted on level l has position lens + l - 1.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from specdec.contracts import Children, DraftState, Features
from specdec.drafters.layers import CachedDrafter, DraftShape
from specdec.drafters.vocab import DraftVocab
from specdec.model.attention import Attend, CacheView, document_mask, document_positions
from specdec.model.cache import KVCache
from specdec.model.layers import unfreeze
from specdec.model.rope import RopeTable


class Place(NamedTuple):
    """Where one node of each row is."""

    positions: Tensor  # [B]
    slots: Tensor  # [B], in the cache
    rope: tuple[Tensor, Tensor]  # cos, sin [B,1,1,Dh]


class RecurrentDrafter(CachedDrafter):
    """Apply one draft layer again and again.

    A subclass defines how features enter (`fuse`), the layer (`layer`) and a `head`, which makes logits of what
    `readout` makes of the layer's output. Cache, positions and the training unroll are defined here.

    There may be several layers, which differ. Layer min(l, layers - 1) then drafts level l. Every layer absorbs the
    committed positions as the first one does, and of the drafted positions sees those that it drafted itself.
    """

    shape: DraftShape

    def __init__(
        self,
        shape: DraftShape,
        taps: tuple[int, ...],
        vocab: DraftVocab,
        embedding: Tensor,
        layers: int = 1,
        rotary_dim: int | None = None,
    ):
        """Share the target's frozen embedding [V,H]; for `rotary_dim` see `Attention`."""
        super().__init__()
        self.shape, self.taps, self.vocab, self.depth = shape, tuple(taps), vocab, layers
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.rope = RopeTable(shape.rope, rotary_dim or shape.head_dim)
        self.recompute = False
        self.ahead: list[Place] = []  # of the levels of a chain while it is drafted

    @abstractmethod
    def fuse(self, feats: Tensor) -> Tensor:
        """Features of the target [B,n,F] -> the layer's hidden input [B,n,H]."""

    @abstractmethod
    def layer(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, index: int) -> Tensor:
        """Return hidden output [B,n,H], which is fed back as it is, from embeddings and hidden input [B,n,H].

        In decoding all three are rows, [B*n,H]. `index` is the number of the layer, 0 for a drafter with one layer.
        """

    def readout(self, hidden: Tensor, index: int) -> Tensor:
        """Hidden output of layer `index` -> the head's input, [B,n,H]; the same unless there is a norm between."""
        return hidden

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [...,H] of tokens at draft positions [...]."""
        return torch.embedding(self.embedding, tokens)

    # Decoding

    @override
    def absorb(
        self, cache: KVCache, feats: Features, tokens: Tensor, n: Tensor, max_len: int, prefill: bool = False
    ) -> DraftState:
        count = tokens.shape[1]
        view = CacheView(cache, count, None, self.shape.heads // self.shape.kv_heads, prefill=prefill)
        positions = cache.lens[:, None] + cache.places[:count]
        feats = feats.to(self.embedding.dtype)  # the drafter's may be narrower than the target's
        rope, hidden = self.rope(positions), self.fuse(feats.flatten(0, 1))
        embeds = self.embed(tokens.flatten(), positions.flatten())
        for index in range(1, self.depth):
            self.layer(embeds, hidden, rope, view.layer(index), index)
        hidden = self.layer(embeds, hidden, rope, view.layer(0), 0).view(*tokens.shape, -1)
        last = (n - 1).clamp_(min=0)  # n is 0 for rows that are finished: their state does not matter
        hidden = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1]))
        cache.advance(n, max_len)
        return DraftState(hidden, self.readout(hidden, 0), self.head)

    @override
    def chain(self, first: DraftState, steps: int, children: Children) -> tuple[Tensor, Tensor]:
        self.ahead = self._places(steps - 1) if steps > 1 else []
        try:
            return super().chain(first, steps, children)
        finally:
            self.ahead = []

    def _places(self, levels: int) -> list[Place]:
        """Of one node a row in each of so many levels. Made at once, they take the operators of one level."""
        cache = self.cache
        positions = cache.lens + cache.places[:levels, None]
        slots = positions + cache.row_start.squeeze(1)
        cos, sin = (x.view(*positions.shape, *x.shape[1:]).unbind() for x in self.rope(positions.view(-1, 1)))
        rope = zip(cos, sin, strict=True)
        return [Place(*of) for of in zip(positions.unbind(), slots.unbind(), rope, strict=True)]

    @override
    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        b, n = tokens.shape
        index = min(level, self.depth - 1)
        first = max(index, 1)  # the first level whose nodes went through this layer
        own = ancestors if first == 1 else ancestors[:, :, (first - 1) * n :]
        if self.ahead:
            positions, _, rope = self.ahead[level - 1]
            slots = self.ahead[level - first].slots
        else:
            positions = (self.cache.lens[:, None] + (level - 1)).expand(b, n)  # all nodes of a level at one
            rope, positions, slots = self.rope(positions), positions.flatten(), None
        groups, offset = self.shape.heads // self.shape.kv_heads, (level - first) * n
        view = CacheView(self.cache, n, own, groups, offset, slots=slots)
        embeds = self.embed(tokens.flatten(), positions)
        hidden = self.layer(embeds, hidden.flatten(0, 1), rope, view.layer(index), index)
        hidden = hidden.view(b, n, -1)
        return DraftState(hidden, self.readout(hidden, index), self.head)

    # Training

    def unroll(self, feats: Tensor, tokens: Tensor, steps: int, needed: Tensor | None = None) -> Iterator[DraftState]:
        """Training-time test (EAGLE-3, arXiv 2503.01840, section 3): step j feeds step j-1's output back, one token on.

        feats [B,T,F], tokens [B,T] one position later (feature t comes with token t+1). Row t of step j stands for the
        decoder's level j after the prefix 0..t: position t+j, keys of step 0 at rows <= t and its own of steps 1..j.
        needed [B,T]: the rows that are wanted of the steps after the first, where all others are 0. No row looks at
        another one's later steps, so that changes nothing of the wanted ones.
        """
        b, t = tokens.shape
        unfreeze(self)
        self.rope.reserve(t + steps, feats)  # in training in fp32, whatever the target's embedding is
        documents = self.documents if self.documents is not None else tokens.new_zeros(b, t)
        some = None if needed is None or steps == 1 else Rows(needed)
        rows, seen = document_positions(documents), document_mask(documents)
        attention = [UnrolledAttention(seen, some) for _ in range(self.depth)]
        layer = partial(recomputed, self.layer) if self.recompute else self.layer
        hidden = context = self.fuse(feats)
        for j in range(steps):
            index = min(j, self.depth - 1)
            if 0 < index == j:  # the first call of this layer: what it sees of the committed positions
                layer(self.embed(tokens, rows).to(feats), context, self.rope(rows), attention[j], j)
            ahead, positions = F.pad(tokens[:, j:], (0, min(j, t))), rows + j
            if j and some:
                ahead, positions = some.of(ahead), some.of(positions)
                hidden = some.of(hidden) if j == 1 else hidden
            embeds = self.embed(ahead, positions).to(feats)
            hidden = layer(embeds, hidden, self.rope(positions), attention[index], index)
            readout = self.readout(hidden, index)
            whole = (some.spread(hidden), some.spread(readout)) if j and some else (hidden, readout)
            yield DraftState(*whole, self.head)


class Rows:
    """Some rows of a batch, as a batch of one long row."""

    def __init__(self, chosen: Tensor) -> None:
        """Select the rows that are set in `chosen`, bool [B,T]."""
        self.shape, self.at = chosen.shape, chosen.flatten().nonzero()[:, 0]

    def of(self, x: Tensor) -> Tensor:
        """Return the selected rows [1,n,...] of x [B,T,...]."""
        return x.flatten(0, 1).index_select(0, self.at)[None]

    def spread(self, x: Tensor) -> Tensor:
        """[1,n,...] -> [B,T,...], 0 where no row is."""
        whole = x.new_zeros(self.shape.numel(), *x.shape[2:])
        return whole.index_copy(0, self.at, x[0]).unflatten(0, self.shape)


class UnrolledAttention:
    """Attend in the unrolled layer over the keys of the first call, and over each later call's own row.

    `seen` [B,T,T] selects the keys of the first call. It is causal, so keys after a block of queries are skipped. Later
    calls may have only the rows `some`.
    """

    BLOCK = 128  # queries

    def __init__(self, seen: Tensor, some: Rows | None = None) -> None:
        """Take the mask `seen`, bool [B,T,T], and the rows of later calls; None: all rows."""
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        self.some = some
        self.bias = bias[:, None, None]  # added: unlike masked_fill, that costs the backward pass nothing
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def copy(self) -> "UnrolledAttention":
        """Return a copy with the same keys and values, whose later calls leave this one as it is."""
        other = copy(self)
        other.keys, other.values = [*self.keys], [*self.values]
        return other

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output of one call, and keep its keys and values for later calls."""
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
        out = [self._attend(q[:, rows], rows, own and (own[0][:, rows], own[1][:, rows])) for rows in blocks]
        return torch.cat(out, dim=1).reshape(b, t, heads * dim)

    def _attend(self, q: Tensor, rows: slice, own: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the output [B,n,K,G,Dh] of queries q of these rows, with own keys and values [B,n,j,K,Dh]."""
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
    """`layer` whose activations are recomputed in the backward pass, but for its own key and value."""

    def run(embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        again = earlier.copy()  # this runs twice, and must leave no trace
        out = layer(embeds, hidden, rope, again, index)
        return out, again.keys[-1], again.values[-1]

    earlier = attend.copy()
    out, key, value = checkpoint(run, embeds, hidden, use_reentrant=False, preserve_rng_state=False)
    attend.keys.append(key)
    attend.values.append(value)
    return out
