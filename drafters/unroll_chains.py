"""The mask rows behind many rows of a text at once: what training and the doctor ask of a `ParallelDrafter`.

The committed rows of a text go through the layers once, causally. The chain of mask rows behind one of them sees the
keys and values of the rows up to that one, of its own document, and the chain's own earlier rows.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdec.drafters.unroll_block import PIECE, BlockAttend
from specdec.model.attention import NoCache, document_mask, document_positions
from specdec.model.layers import unfreeze


class TextView(NoCache):
    """Causal attention over the rows of texts, whose keys and values are kept for the chains behind them."""

    def __init__(self, documents: Tensor):
        """documents [B,T]"""
        super().__init__(mask=document_mask(documents))
        self.kept: list[tuple[Tensor, Tensor]] = []  # of each layer

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kept.append((k, v))
        return super().attend(layer, q, k, v)


class ChainView:
    """Attention of chains [B,A] of `length` mask rows each over the rows kept by a `TextView`, and over themselves."""

    def __init__(self, kept: list[tuple[Tensor, Tensor]], seen: Tensor, length: int):
        """seen [B,A,T]: which rows of its text each chain sees."""
        own = torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
        self.layers = [BlockAttend(keys, seen[:, :, None].expand(-1, -1, length, -1), own) for keys in kept]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layers[layer](q, k, v)


def chains_behind(
    drafter, feats: Tensor | None, tokens: Tensor, anchors: Tensor, lengths: Sequence[int] | None
) -> Tensor:
    """What the head reads of the slots of the blocks behind rows anchors [B,A], [B,A,W,H]: slot 0 is the row itself,
    the others its chain. See `ParallelDrafter.blocks`."""
    unfreeze(drafter)
    documents = torch.zeros_like(tokens) if drafter.documents is None else drafter.documents
    feats, tokens, documents, anchors = drafter.texts(feats, tokens, documents, anchors)
    positions = document_positions(documents)
    drafter.reserve(tokens.shape[1] + drafter.block)
    text = TextView(documents)
    first = drafter.run(drafter.real(feats, tokens), positions, text)
    first = first.gather(1, anchors.clamp(min=0)[..., None].expand(-1, -1, first.shape[-1]))[:, :, None]
    masked = drafter.masked(feats, anchors)
    piece = partial(_piece, drafter, text.kept, documents, positions)
    if drafter.recompute:
        piece = partial(checkpoint, piece, use_reentrant=False, preserve_rng_state=False)
    chains = []
    for start in range(0, anchors.shape[1], PIECE):
        columns = slice(start, start + PIECE)
        length = (drafter.block if lengths is None else max(lengths[columns])) - 1
        part = first[:, columns]
        if length > 0:
            part = torch.cat([part, piece(masked[:, columns], anchors[:, columns], length)], 2)
        chains.append(F.pad(part, (0, 0, 0, drafter.block - part.shape[2])))
    return torch.cat(chains, 1)


def _piece(
    drafter, kept: list, documents: Tensor, positions: Tensor, masked: Tensor, anchors: Tensor, length: int
) -> Tensor:
    """masked [B,A,E], anchors [B,A] -> [B,A,length,H]"""
    here, rows = anchors.clamp(min=0), torch.arange(documents.shape[1], device=anchors.device)
    same = documents.gather(1, here)[..., None] == documents[:, None]
    seen = same & (rows <= anchors[..., None])
    ends = torch.where(anchors < 0, -1, positions.gather(1, here))  # with nothing before it a chain begins the text
    places = ends[..., None] + 1 + torch.arange(length, device=anchors.device)
    rows = masked[:, :, None].expand(-1, -1, length, -1).flatten(1, 2)
    out = drafter.run(rows, places.flatten(1), ChainView(kept, seen, length))
    return out.unflatten(1, (-1, length))
