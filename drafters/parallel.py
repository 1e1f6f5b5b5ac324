"""Drafters that guess a block by mask tokens after the text, in one causal forward: P-EAGLE and PARD.

The rows of the committed positions are as those of a recurrent drafter: the target's feature of token t, and token
t+1. After the last of them come block - 1 mask rows, at the positions that follow. The last committed row and the mask
rows each draft a token, slot k the one at k + 1 positions after the last token. Keys and values of the mask
rows are overwritten by the next forward. No row sees a later one, so a block may as well be shorter.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.contracts import DraftState, Features
from specdec.drafters.layers import CachedDrafter
from specdec.drafters.unroll_block import Blocks, chains_behind
from specdec.model.attention import CacheView, NoCache
from specdec.model.cache import KVCache


class ParallelDrafter(CachedDrafter):
    """A subclass says what its layers take of a row (`real`, `masked`), and what they make of it (`run`)."""

    block: int
    recompute = False
    earliest = 1  # first place of a document after which a block is trained: the first with a feature before it

    def set_block(self, block: int) -> None:
        """Let it draft so many tokens. Raises ValueError for fewer than two, which need no mask row."""
        if block < 2:
            raise ValueError(f"block_size must be at least 2, as a block of one token has no mask rows, got {block}")
        self.block = self.spare = block

    @abstractmethod
    def real(self, feats: Features, tokens: Tensor) -> Tensor:
        """What the layers take of committed rows: features [B,n,F], tokens [B,n] one further on -> [B,n,E]."""

    @abstractmethod
    def masked(self, feats: Features, anchors: Tensor) -> Tensor:
        """What they take of the mask rows after rows anchors [B,A] of feats [B,n,F] -> [B,A,E]."""

    @abstractmethod
    def run(self, rows: Tensor, positions: Tensor, view: CacheView | NoCache) -> Tensor:
        """What the head reads of rows [B,n,E] at positions [B,n], which attend by `view` -> [B,n,H]."""

    # Decoding

    def absorb(
        self, cache: KVCache, feats: Features, tokens: Tensor, n: Tensor, max_len: int, prefill: bool = False
    ) -> DraftState:
        """Read the first n [B] of P positions and the mask rows in one causal forward of P + block - 1 rows.

        Padding rows come last, and no other row sees them.
        """
        b, count = tokens.shape
        more, last = self.block - 1, (n - 1).clamp(min=0)  # n is 0 for rows that are finished
        places = cache.places[: count + more]
        masked = self.masked(feats, last[:, None])
        rows = F.pad(self.real(feats, tokens), (0, 0, 0, more))
        rows = torch.where((places < n[:, None])[..., None], rows, masked)
        view = CacheView(cache, count + more, None, self.shape.heads // self.shape.kv_heads, prefill=prefill)
        hidden = self.run(rows, cache.lens[:, None] + places, view)
        slots = last[:, None] + cache.places[: self.block]
        hidden = hidden.gather(1, slots[..., None].expand(-1, -1, hidden.shape[-1]))
        cache.advance(n, max_len)
        return DraftState(hidden.new_empty(b, self.block, 0), hidden, self.head)

    # Training

    def blocks(self, feats: Tensor, tokens: Tensor, anchors: Tensor, lengths: Sequence[int] | None = None) -> Blocks:
        """The blocks after rows anchors [B,A] of texts: feats [B,T,F], tokens [B,T] one position later.

        lengths: how many slots of each of the A columns are wanted, None for all; best in descending order, as pieces
        of columns are computed as far as the longest needs. The other slots are 0, or what they are.
        """
        return Blocks(chains_behind(self, feats, tokens, anchors, lengths), self.head)

    def unroll(self, feats: Tensor, tokens: Tensor, steps: int, needed: Tensor | None = None) -> Iterator[DraftState]:
        """The block after every row."""
        if steps > self.block:
            raise ValueError(f"steps is {steps}, but a block drafts {self.block} tokens only")
        every = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        readout = self.blocks(feats, tokens, every, [steps] * tokens.shape[1]).readout
        for j in range(steps):
            yield DraftState(readout.new_empty(*tokens.shape, 0), readout[:, :, j], self.head)
