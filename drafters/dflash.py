"""Drafters that guess a block of tokens in one forward: DFlash (arXiv 2602.06036) and its family, as switches.

The block is the anchor, which is the last emitted token at position p, followed by mask tokens. Slot k has RoPE
position p + k. Every layer attends over the block and over the context: the committed positions before p. Keys and
values of a context position are the layer's own projections of the target's fused hidden states there, never of a
token. No layer changes them, so they are written once, at prefill or when a token is accepted. Those of the block are
overwritten by the next round.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from specdec.children import LIKELIEST
from specdec.contracts import Children, DraftState, Features
from specdec.drafters.block_layers import BlockForward, BlockLayer, SlotConvolution
from specdec.drafters.conditional import ConditionalHead, Confidence, head_of
from specdec.drafters.eagle3 import spread_taps
from specdec.drafters.layers import CachedDrafter, DraftShape, SharedHead, mask_row, split_sizes, start
from specdec.drafters.unroll_block import Blocks, blocks_behind
from specdec.drafters.vocab import DraftVocab
from specdec.model.attention import CacheView
from specdec.model.cache import KVCache
from specdec.model.layers import Linear, LinearMap, ModuleList, RMSNorm, unfreeze
from specdec.model.rope import RopeTable
from specdec.model.target import check_taps


class BlockDrafter(CachedDrafter):
    """Draft a block of tokens in one forward, with the target's embedding and head.

    A conditional head may follow, which changes the logits of a slot by the tokens drafted before it.
    """

    shape: DraftShape
    switches: BlockForward
    block: int
    masks: Tensor  # [1,rows-1] ids
    depths: Tensor  # [rows]
    seen: Tensor  # [rows,rows] bool; None without such layers
    seen_sliding: Tensor
    base: Tensor  # [B,block,U] logits of the slots of the tree that grows
    recompute = False

    def __init__(
        self,
        shape: DraftShape,
        layers: int,
        taps: tuple[int, ...],
        vocab: DraftVocab,
        embedding: Tensor,
        head: Tensor | None,
        forward: BlockForward,
        conditional: ConditionalHead | None = None,
        confidence: Confidence | None = None,
    ):
        """embedding, head [V,H]: the target's, shared and frozen; head None: the drafter has its own."""
        super().__init__()
        self.shape, self.taps, self.vocab, self.switches = shape, tuple(taps), vocab, forward
        self.block, self.spare, self.depth = forward.drafts, forward.rows, layers
        self.sliding = forward.sliding or (False,) * layers
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("masks", torch.full((1, forward.rows - 1), forward.mask_token), persistent=False)
        self.register_buffer("depths", forward.depths(), persistent=False)
        for name, sliding in (("seen", False), ("seen_sliding", True)):
            used = sliding in self.sliding
            self.register_buffer(name, forward.seen(sliding) if used else None, persistent=False)
        self.rope = RopeTable(shape.rope, shape.head_dim)
        self.fc = Linear(len(taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = ModuleList(BlockLayer(shape, forward) for _ in range(layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        shared = None if head is None else SharedHead(head, vocab.ids)
        self.head = shared or Linear(shape.hidden, vocab.size, bias=False)
        self.conditional, self.confidence = conditional, confidence
        self.conditioned, self.confident = conditional is not None, confidence is not None
        self.cut = 0.0  # a proposal ends before the first slot whose confidence is lower

    @override
    def heads_in_use(self) -> list[LinearMap]:
        return [self.head, *([self.conditional.head] if self.conditional else [])]

    @override
    def set_heads(self, heads: list[LinearMap]) -> None:
        self.head, *others = heads
        if self.conditional:
            (self.conditional.head,) = others

    def fuse(self, feats: Tensor) -> Tensor:
        """Features of the target [B,n,F] -> what every layer takes for the context [B,n,H]."""
        return self.hidden_norm(self.fc(feats.to(self.fc.weight.dtype)))  # the drafter's dtype may be narrower

    # Decoding

    @override
    def absorb(
        self, cache: KVCache, feats: Features, tokens: Tensor, n: Tensor, max_len: int, prefill: bool = False
    ) -> DraftState:
        places = cache.places[: tokens.shape[1]]
        rope, slots = self.rope(cache.lens[:, None] + places), cache.slots_of(places)
        features = self.fuse(feats)
        for index, layer in enumerate(self.layers):
            cache.write(index, slots, *layer.attention.context(features, rope))
        cache.advance(n, max_len)
        last = (n - 1).clamp_(min=0)  # n is 0 for rows that are finished: their state does not matter
        return self._draft(cache, tokens.gather(1, last[:, None]))

    def _draft(self, cache: KVCache, anchor: Tensor) -> DraftState:
        """Draft the block after anchors [B,1], over the context in the cache."""
        b, rows = len(anchor), self.switches.rows
        hidden = F.embedding(torch.cat([anchor, self.masks.expand(b, -1)], 1), self.embedding)
        rope = self.rope(cache.lens[:, None] + cache.places[:rows])
        views = {sliding: self._view(cache, sliding) for sliding in set(self.sliding)}
        for index, (layer, sliding) in enumerate(zip(self.layers, self.sliding, strict=True)):
            hidden = layer(hidden, rope, views[sliding].layer(index))
        readout = self.norm(hidden)[:, self.switches.unused :]
        carried = self.conditional.begin(anchor) if self.conditional else readout.new_empty(*readout.shape[:2], 0)
        state = DraftState(carried, readout, self.head)
        state.levels = self._kept(state) if self.cut else None
        return state

    def _kept(self, first: DraftState) -> Tensor:
        """[B]: number of slots before the first one that is not confident, along the most likely tokens."""
        tokens, _ = self.chain(first, self.block, LIKELIEST)
        return (self.confidences(first, tokens).sigmoid() >= self.cut).cumprod(1).sum(1)

    def confidences(self, first: DraftState, tokens: Tensor) -> Tensor:
        """Return logits [B,n] of the acceptance of the first n slots, given their tokens [B,n]."""
        if self.confidence is None:
            raise ValueError("this drafter has no confidence head to cut proposals by")
        carried = [first.hidden]
        if self.conditional:
            for token in tokens[:, :-1].split(1, 1):
                carried.append(self.conditional.read(token, carried[-1]))
        return self.confidence(first.readout[:, : tokens.shape[1]], torch.cat(carried, 1)[..., : self.confidence.rank])

    def _view(self, cache: KVCache, sliding: bool) -> CacheView:
        b, rows = cache.batch, self.switches.rows
        groups, seen = self.shape.heads // self.shape.kv_heads, self.seen_sliding if sliding else self.seen
        depth, window = (self.depths.expand(b, -1), self.switches.span) if sliding else (None, None)
        return CacheView(cache, rows, seen.expand(b, rows, rows), groups, depth=depth, window=window)

    @override
    def root(self, first: DraftState) -> DraftState:
        if self.conditional is None:
            return first.slot(0, 1)
        self.base = first.logits  # of all slots in one product: the head's weights are most of what drafting reads
        return self._conditioned(self.conditional, first, 0, first.hidden)

    @override
    def expand(self, first: DraftState, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        if self.conditional is None:
            return first.slot(level, tokens.shape[1])
        return self._conditioned(self.conditional, first, level, self.conditional.read(tokens, hidden))

    def _conditioned(self, head: ConditionalHead, first: DraftState, level: int, carried: Tensor) -> DraftState:
        """Return the state of slot `level` of a block after paths whose tokens gave `carried` [B,W,C]."""
        readout = first.readout[:, level : level + 1]
        logits, carried = head(self.base[:, level : level + 1], readout, carried, level)
        return DraftState(carried, logits)

    @override
    def chain(self, first: DraftState, steps: int, children: Children) -> tuple[Tensor, Tensor]:
        if self.conditional:
            return super().chain(first, steps, children)
        gains, ids = children.best(first.first(steps), self.vocab, slice(0, steps), 1)  # one product with the head
        return self.vocab.to_target(ids[..., 0]), gains[..., 0].cumsum(1)

    # Training

    def blocks(self, feats: Tensor, tokens: Tensor, anchors: Tensor, visible: Tensor | None = None) -> Blocks:
        """Return the blocks after rows `anchors` [B,A] of texts, see `blocks_behind`."""
        unfreeze(self)
        return blocks_behind(self, feats, tokens, anchors, visible)

    def unroll(self, feats: Tensor, tokens: Tensor, steps: int, needed: Tensor | None = None) -> Iterator[DraftState]:
        """The block after every row, with the text's own tokens for those drafted before a slot."""
        if steps > self.block:
            raise ValueError(f"steps is {steps}, but a block drafts {self.block} tokens only")
        every = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        blocks = self.blocks(feats, tokens, every)
        for j in range(steps):
            yield DraftState(blocks.carried[j], blocks.readout[:, :, j], blocks.head)

    def start_from(self, target) -> None:
        """The head sees the last hidden state at its usual scale. Convolutions change nothing at first."""
        self.norm.weight.fill_(target.final_scale())
        for part in self.modules():
            if isinstance(part, SlotConvolution):
                part.start()


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """Return the published taps, spread over the target's layers, as indices into hidden_states.

    On a target too shallow for that, the taps are its last layers, at most `count`.
    """
    if 2 <= count <= layers - 3:
        return spread_taps(layers, count)
    return tuple(range(max(1, layers - count + 1), layers + 1))


def create(
    target,
    *,
    vocab: DraftVocab | None = None,
    layers: int = 5,
    taps: tuple[int, ...] | int = 5,
    block_size: int = 16,
    mask_token: int | None = None,
    sliding_layers: int = 0,
    conditional: str | None = None,
    rank: int = 256,
    head: Mapping[str, int] | None = None,
    confidence: bool = False,
    init: str = "target",
    **settings,
) -> BlockDrafter:
    """A fresh block drafter for a target.

    taps: indices, or how many to spread over the layers. mask_token: None is the last row of the target's embedding.
    sliding_layers: so many of the first layers have windows. conditional: a name of `conditional.HEADS`, of rank
    `rank`; head: its own settings. confidence: with a confidence head, which sees the token before a slot if there is a
    conditional one. init: see `layers.start`. settings: sizes as in `layers.shape_like`, and further fields of
    `BlockForward`.
    """
    config = target.config
    if layers < 1 or not 0 <= sliding_layers <= layers:
        raise ValueError(
            f"layers must be at least 1 and sliding_layers from 0 to it, got {layers} and {sliding_layers}"
        )
    taps = default_taps(config.layers, taps) if isinstance(taps, int) else tuple(taps)
    check_taps(taps, config.layers)
    shape, forward = split_sizes(target, settings)
    embedding, vocab = target.embed.weight, vocab or DraftVocab(target.vocab)
    mask = mask_row(mask_token, embedding)
    sliding = tuple(index < sliding_layers for index in range(layers)) if sliding_layers else ()
    switches = BlockForward(block_size, mask, sliding=sliding, **forward)
    conditional_head = head_of(conditional, vocab, embedding, rank, head or {})
    sure = Confidence(shape.hidden, rank if conditional else 0) if confidence else None
    drafter = BlockDrafter(shape, layers, taps, vocab, embedding, target.head.weight, switches, conditional_head, sure)
    start(drafter, target, init)
    return drafter
