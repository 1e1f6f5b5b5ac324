"""The blocks after many rows of a text at once, for training and for `specdec checkpoint check`.

Row t of a text has the target's features of token t, and token t+1. The block of a `BlockDrafter` after
row t has token t+1 as its anchor, sees the context of rows 0..t of its own document, and nothing of other blocks.

The committed rows of a `ParallelDrafter` go through the layers once, causally. The chain of mask rows after one of
them sees the keys and values of the rows up to that one, of its own document, and the chain's own earlier rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from specdec.contracts import Features
from specdec.drafters.conditional import ConditionalHead
from specdec.drafters.layers import SumHead
from specdec.model.attention import Attend, NoCache, document_mask, document_positions
from specdec.model.layers import LinearMap, unfreeze

PIECE = 64  # anchors at once


def attend_blocks(context: tuple[Tensor, Tensor], seen: Tensor, own: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention [B,A*rows,heads*Dh] of A blocks of a layer over their context and over themselves.

    context: keys and values [B,T,K,Dh]; seen [B,A,rows,T], own [rows,rows] bool: what slots see of both. q
    [B,A*rows,heads,Dh], k, v [B,A*rows,K,Dh]: as of an `Attend`.
    """
    _, a, rows, _ = seen.shape
    shape, kv_heads, (keys, values) = q.shape, k.shape[2], context
    q = q.view(len(q), a, rows, kv_heads, -1, shape[-1]) * shape[-1] ** -0.5
    k, v = (x.view(len(x), a, rows, kv_heads, -1) for x in (k, v))
    scores = [torch.einsum("barkgd,bskd->bkgars", q, keys), torch.einsum("barkgd,bamkd->bkgarm", q, k)]
    visible = torch.cat([seen, own.expand(*seen.shape[:3], -1)], -1)[:, None, None]  # over heads
    weights = torch.cat(scores, -1).float().masked_fill(~visible, -torch.inf).softmax(-1).to(v.dtype)
    past, within = weights.split([keys.shape[1], rows], -1)
    out = torch.einsum("bkgars,bskd->barkgd", past, values) + torch.einsum("bkgarm,bamkd->barkgd", within, v)
    return out.reshape(*shape[:2], -1)


@dataclass
class Blocks:
    """A blocks of each of B texts, of W slots that draft. The text's own tokens replace the drafted ones."""

    readout: Tensor  # [B,A,W,R] what the head reads
    head: LinearMap | SumHead
    carried: Sequence[Tensor] = ()  # of each slot [B,A,C], what a conditional head carries when it comes to the slot
    confidence: Tensor | None = None  # [B,A,W] logits of the confidence head, if there is one


def blocks_behind(drafter, feats: Tensor, tokens: Tensor, anchors: Tensor, visible: Tensor | None = None) -> Blocks:
    """Return the blocks of a `BlockDrafter` after rows `anchors` [B,A] of texts.

    feats [B,T,F], tokens [B,T] one position later. visible [B,A]: how many tokens of each block are the text's own
    instead of mask tokens; None: only the anchor.
    """
    slots, conditional = slots_behind(drafter, feats, tokens, anchors, visible), drafter.conditional
    readout, output = slots, drafter.head
    if conditional is None:
        carried = [slots.new_empty(*anchors.shape, 0)] * slots.shape[2]
    else:
        carried, low = _along(conditional, slots, tokens, anchors)
        readout, output = torch.cat([slots, low], -1), conditional.joined(drafter.head)
    sure = drafter.confidence
    if sure is not None:
        sure = sure(slots, torch.stack(carried, 2)[..., : sure.rank])
    return Blocks(readout, output, carried, sure)


def _along(head: ConditionalHead, slots: Tensor, tokens: Tensor, anchors: Tensor) -> tuple[list[Tensor], Tensor]:
    """What a conditional head carries to each slot [B,A,C], and what its head reads there [B,A,W,R]."""
    carried, low, now = [], [], head.begin(tokens.gather(1, anchors))
    for j in range(slots.shape[2]):
        if j:
            now = head.read(tokens.gather(1, (anchors + j).clamp(max=tokens.shape[1] - 1)), now)
        carried.append(now)
        features, now = head.narrow(slots[:, :, j], now, j)
        low.append(features)
    return carried, torch.stack(low, 2)


def slots_behind(drafter, feats: Tensor, tokens: Tensor, anchors: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the backbone's hidden states [B,A,W,H] of the drafting slots. For the arguments see `blocks_behind`."""
    documents = torch.zeros_like(tokens) if drafter.documents is None else drafter.documents
    positions = document_positions(documents)
    drafter.rope.reserve(tokens.shape[1] + drafter.switches.rows, drafter.fc.weight)
    rope, fused = drafter.rope(positions), drafter.fuse(feats)
    keys = [layer.attention.context(fused, rope) for layer in drafter.layers]
    piece = partial(_block_piece, drafter, keys, documents, positions, tokens)
    if drafter.recompute:
        piece = partial(checkpoint, piece, use_reentrant=False, preserve_rng_state=False)
    visible = torch.ones_like(anchors) if visible is None else visible
    parts = zip(anchors.split(PIECE, dim=1), visible.split(PIECE, dim=1), strict=True)
    return torch.cat([piece(*part) for part in parts], 1)


def _block_piece(
    drafter, keys: list, documents: Tensor, positions: Tensor, tokens: Tensor, anchors: Tensor, visible: Tensor
) -> Tensor:
    """`slots_behind` for some of the anchors. keys: keys and values [B,T,K,Dh] of the texts in each layer."""
    how, rows = drafter.switches, torch.arange(drafter.switches.rows, device=anchors.device)
    texts = tokens.gather(1, (anchors[..., None] + rows).clamp(max=tokens.shape[1] - 1).flatten(1))
    ids = torch.where(rows < visible[..., None], texts.view(*anchors.shape, -1), how.mask_token)
    hidden = F.embedding(ids.flatten(1), drafter.embedding).to(drafter.fc.weight)  # the target's may be narrower
    first = positions.gather(1, anchors)[..., None] + 1
    rope = drafter.rope((first + rows).flatten(1))
    before = _text_before(documents, anchors)[:, :, None].expand(-1, -1, how.rows, -1)
    views = {}
    for sliding in set(drafter.sliding):
        text = before
        if sliding:
            text = before & (positions[:, None, None] > (first + drafter.depths)[..., None] - how.span)
        views[sliding] = text, how.seen(sliding).to(anchors.device)
    for layer, text_keys, sliding in zip(drafter.layers, keys, drafter.sliding, strict=True):
        hidden = layer(hidden, rope, partial(attend_blocks, text_keys, *views[sliding]))
    return drafter.norm(hidden).unflatten(1, (-1, how.rows))[:, :, how.unused :]


def _text_before(documents: Tensor, anchors: Tensor) -> Tensor:
    """[B,A,T] bool: the rows of each text up to its rows `anchors` [B,A], of their documents; none for an anchor -1."""
    same = documents.gather(1, anchors.clamp(min=0))[..., None] == documents[:, None]
    return same & (torch.arange(documents.shape[1], device=anchors.device) <= anchors[..., None])


class TextView(NoCache):
    """Causal attention over the rows of texts, which stores their keys and values for the chains that follow."""

    def __init__(self, documents: Tensor):
        """Let each row see the earlier rows of its document, `documents` [B,T]."""
        super().__init__(mask=document_mask(documents))
        self.text_keys: list[tuple[Tensor, Tensor]] = []  # of each layer

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.text_keys.append((k, v))
        return super().attend(layer, q, k, v)


class ChainView:
    """Attention of chains [B,A] of `length` mask rows each over the rows of a `TextView`, and over themselves."""

    def __init__(self, text_keys: list[tuple[Tensor, Tensor]], seen: Tensor, length: int):
        """Take which rows of its text each chain sees, `seen` bool [B,A,T]."""
        own = torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
        seen = seen[:, :, None].expand(-1, -1, length, -1)
        self.attends = [partial(attend_blocks, keys, seen, own) for keys in text_keys]

    def layer(self, index: int) -> Attend:
        """Return the attention of the chains in layer `index`."""
        return self.attends[index]


def chains_behind(drafter, feats: Features, tokens: Tensor, anchors: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """Return the head's input [B,A,W,H] at the slots of the blocks after rows `anchors` [B,A].

    Slot 0 is the row itself, the others its chain. See `ParallelDrafter.blocks`.
    """
    unfreeze(drafter)
    documents = torch.zeros_like(tokens) if drafter.documents is None else drafter.documents
    feats, tokens, documents, anchors = drafter.texts(feats, tokens, documents, anchors)
    positions = document_positions(documents)
    drafter.reserve(tokens.shape[1] + drafter.block)
    text = TextView(documents)
    first = drafter.run(drafter.real(feats, tokens), positions, text)
    first = first.gather(1, anchors.clamp(min=0)[..., None].expand(-1, -1, first.shape[-1]))[:, :, None]
    masked = drafter.masked(feats, anchors)
    piece = partial(_chain_piece, drafter, text.text_keys, documents, positions)
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


def _chain_piece(
    drafter, text_keys: list, documents: Tensor, positions: Tensor, masked: Tensor, anchors: Tensor, length: int
) -> Tensor:
    """Return the output [B,A,length,H] of chains of mask rows `masked` [B,A,E] after `anchors` [B,A]."""
    ends = torch.where(anchors < 0, -1, positions.gather(1, anchors.clamp(min=0)))  # -1: nothing is before the chain
    places = ends[..., None] + 1 + torch.arange(length, device=anchors.device)
    rows = masked[:, :, None].expand(-1, -1, length, -1).flatten(1, 2)
    out = drafter.run(rows, places.flatten(1), ChainView(text_keys, _text_before(documents, anchors), length))
    return out.unflatten(1, (-1, length))
