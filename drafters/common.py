"""What all recurrent drafters share: one transformer layer over its own cache, fed with the target's features at
committed positions and with its own output at drafted ones; and the same layer unrolled for training.

Conventions (EAGLE, SafeAILab/EAGLE `cnets.py`): draft position t holds the feature of token t and the embedding of
token t+1 and predicts token t+2. Its RoPE position is t. A node drafted on level l has position lens + l - 1.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.vocab import DraftVocab
from specdec.attention import CacheView
from specdec.cache import KVCache
from specdec.layers import Rope, RopeTable, check_heads, rotate
from specdec.types import DraftState

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B,n,heads,Dh], k, v [B,n,K,Dh] -> [B,n,heads*Dh]


@dataclass(frozen=True)
class DraftShape:
    """The shape of a one-layer drafter. `hidden` is the draft's own, and the width of the target's embeddings."""

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


class DraftAttention(nn.Module):
    """Attention of the draft layer: fused q, k, v over an input of any width."""

    def __init__(self, shape: DraftShape, width: int, bias: bool = False):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.qkv = nn.Linear(width, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, bias=bias)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        qkv = self.qkv(x).view(*x.shape[:2], -1, self.head_dim)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        q, k = rotate(qk, *rope).split([self.heads, self.kv_heads], dim=2)
        return self.o(attend(q, k, v))


class RecurrentDrafter(nn.Module):
    """A drafter of one layer applied again and again. A subclass says how features enter (`fuse`), what the layer is
    (`layer`), and how its output becomes logits (`predict`); cache, positions and training unroll live here."""

    def __init__(self, shape: DraftShape, taps: tuple[int, ...], vocab: DraftVocab, embedding: Tensor):
        """embedding [V,H]: the target's, shared and frozen."""
        super().__init__()
        self.shape, self.taps, self.vocab = shape, tuple(taps), vocab
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.rope = RopeTable(shape.rope, shape.head_dim)
        self.cache: KVCache | None = None

    @abstractmethod
    def fuse(self, feats: Tensor) -> Tensor:
        """Features of the target [B,n,F] -> the layer's hidden input [B,n,H]."""

    @abstractmethod
    def layer(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """One draft position each: embeddings and hidden input [B,n,H] -> hidden output [B,n,H], fed back as it is."""

    @abstractmethod
    def predict(self, hidden: Tensor) -> Tensor:
        """Hidden output [B,n,H] -> logits [B,n,U]."""

    # Decoding

    def reset(self, batch: int, slots: int, first: Tensor) -> None:
        shape = self.shape
        self.rope.reserve(slots, self.embedding)
        self.cache = KVCache(1, batch, slots, shape.kv_heads, shape.head_dim, like=self.embedding)

    def extend(self, feats: Tensor, tokens: Tensor, n: Tensor, bound: int) -> DraftState:
        hidden = self._forward(tokens, self.fuse(feats), None, 0)
        last = (n - 1).clamp_(min=0)  # n is 0 for rows that are finished: their state does not matter
        hidden = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1]))
        self.cache.advance(n, bound)
        return DraftState(self.predict(hidden), hidden)

    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        hidden = self._forward(tokens, hidden, ancestors, level)
        return DraftState(self.predict(hidden), hidden)

    def _forward(self, tokens: Tensor, hidden: Tensor, ancestors: Tensor | None, level: int) -> Tensor:
        """Level 0 are committed positions, one after the other; on a tree level all nodes share one position."""
        b, n = tokens.shape
        cache, groups = self.cache, self.shape.heads // self.shape.kv_heads
        if level == 0:
            view = CacheView(cache, n, None, groups)
            positions = cache.lens[:, None] + torch.arange(n, device=tokens.device)
        else:
            view = CacheView(cache, n, ancestors, groups, offset=(level - 1) * n)
            positions = (cache.lens[:, None] + (level - 1)).expand(b, n)
        attend = lambda q, k, v: view.attend(0, q, k, v)  # noqa: E731
        return self.layer(F.embedding(tokens, self.embedding), hidden, self.rope(positions), attend)

    # Training

    def unroll(self, feats: Tensor, tokens: Tensor, steps: int) -> Iterator[DraftState]:
        """Training-time test (EAGLE-3, arXiv 2503.01840, section 3): step j feeds step j-1's output back, one token on.

        feats [B,T,F], tokens [B,T] one position later (token t+1 beside feature t). Row t of step j stands for the
        decoder's level j after the prefix 0..t: position t+j, keys of step 0 at rows <= t and its own of steps 1..j.
        """
        b, t = tokens.shape
        self.rope.reserve(t + steps, self.embedding)
        rows = torch.arange(t, device=tokens.device).expand(b, t)
        attend = UnrolledAttention()
        hidden = self.fuse(feats)
        for j in range(steps):
            ahead = F.pad(tokens[:, j:], (0, min(j, t)))
            hidden = self.layer(F.embedding(ahead, self.embedding), hidden, self.rope(rows + j), attend)
            yield DraftState(self.predict(hidden), hidden)


class UnrolledAttention:
    """Attention of the unrolled layer: causal over the keys of the first call, and over each later call's own row."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        b, t, heads, dim = q.shape
        kv_heads = k.shape[2]
        q = q.view(b, t, kv_heads, heads // kv_heads, dim) * dim**-0.5
        context = torch.einsum("btkgd,bskd->bkgts", q, self.keys[0]).float()
        later = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
        context = context.masked_fill(later, -torch.inf)
        own = [torch.einsum("btkgd,btkd->bkgt", q, key).float()[..., None] for key in self.keys[1:]]
        weights = torch.cat([context, *own], dim=-1).softmax(-1).to(v.dtype)
        out = torch.einsum("bkgts,bskd->btkgd", weights[..., :t], self.values[0])
        for i, value in enumerate(self.values[1:]):
            out = out + weights[..., t + i].permute(0, 3, 1, 2)[..., None] * value[:, :, :, None]
        return out.reshape(b, t, heads * dim)
