"""P-EAGLE: EAGLE-3's layer, then ordinary ones, and a block of mask rows in one forward (arXiv 2602.01469)."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from specdec.contracts import Features
from specdec.drafters.eagle3 import Eagle3, Eagle3Forward, choose_taps
from specdec.drafters.layers import DraftLayer, DraftShape, SharedHead, mask_row, split_sizes, start
from specdec.drafters.parallel import ParallelDrafter
from specdec.drafters.vocab import DraftVocab
from specdec.model.attention import Attention, CacheView, NoCache
from specdec.model.layers import ModuleList
from specdec.model.target import check_taps


class PEagle(ParallelDrafter, Eagle3):
    """Draft a block with the published P-EAGLE head.

    A mask row has the embedding of the mask token, and `mask_hidden` [F] in place of the target's features, before
    `fc`. The embedding is the head's own, and is trained.
    """

    def __init__(
        self,
        shape: DraftShape,
        layers: int,
        taps: tuple[int, ...],
        vocab: DraftVocab,
        embedding: Tensor,
        block: int,
        mask_token: int,
        forward: Eagle3Forward | None = None,
        tap_width: int | None = None,
    ):
        """Build the head; its own embedding starts as `embedding` [V,H].

        `tap_width` is the hidden size of the target, if it differs from the draft's.
        """
        super().__init__(shape, taps, vocab, embedding, forward, tap_width)
        if self.switches.feedback == "post" or not self.switches.head_norm:
            raise ValueError("P-EAGLE feeds nothing back and has a norm before its head: leave feedback and head_norm")
        del self.embedding
        self.embedding = nn.Parameter(embedding.detach().float().clone())  # the target's must stay as it is
        self.set_block(block)
        self.mask_token, self.depth = mask_token, layers
        how = self.switches
        attentions = (Attention(shape, shape.hidden, how.qkv_bias, how.qk_norm) for _ in range(1, layers))
        self.upper = ModuleList(DraftLayer(shape, attention) for attention in attentions)
        self.mask_hidden = nn.Parameter(torch.zeros(self.fc.in_features))
        self.tap_width = self.fc.in_features // len(taps)

    def reserve(self, positions: int) -> None:
        """Extend the tables of the rotary embedding to `positions`."""
        self.rope.reserve(positions, self.embedding)

    def texts(self, feats: Tensor, tokens: Tensor, documents: Tensor, anchors: Tensor) -> tuple[Tensor, ...]:
        """Texts as rows: as they are."""
        return feats, tokens, documents, anchors

    @override
    def real(self, feats: Features, tokens: Tensor) -> Tensor:
        embeds = nn.functional.embedding(tokens, self.embedding)
        return torch.cat([embeds, self.fuse(feats.to(self.embedding.dtype))], -1)

    @override
    def masked(self, feats: Features, anchors: Tensor) -> Tensor:
        row = torch.cat([self.embedding[self.mask_token], self.fuse(self.mask_hidden[None])[0]])
        return row.expand(*anchors.shape, -1)

    @override
    def run(self, rows: Tensor, positions: Tensor, view: CacheView | NoCache) -> Tensor:
        rope, (embeds, hidden) = self.rope(positions), rows.chunk(2, -1)
        hidden = self.layer(embeds, hidden, rope, view.layer(0), 0)
        for index, layer in enumerate(self.upper, 1):
            hidden = layer(hidden, rope, view.layer(index))
        return self.norm(hidden)


def create(
    target,
    *,
    vocab: DraftVocab | None = None,
    layers: int = 4,
    taps: tuple[int, ...] | int | str | None = None,
    block_size: int = 8,
    mask_token: int | None = None,
    rope_theta: float = 10000.0,
    init: str = "target",
    train_head: bool = True,
    **settings,
) -> PEagle:
    """A fresh P-EAGLE drafter for a target.

    block_size: how many tokens it drafts. mask_token: None is the last row of the target's embedding. taps, train_head,
    init and settings as in `eagle3.create`.
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    shape, forward = split_sizes(target, settings, rope_theta=rope_theta)
    depth, embedding, vocab = target.config.layers, target.embed.weight, vocab or DraftVocab(target.vocab)
    taps = choose_taps(depth, taps)
    check_taps(taps, depth)
    mask = mask_row(mask_token, embedding)
    drafter = PEagle(shape, layers, taps, vocab, embedding, block_size, mask, Eagle3Forward(**forward))
    start(drafter, target, init)
    nn.init.normal_(drafter.mask_hidden)
    if not train_head:
        drafter.head = SharedHead(target.head.weight, vocab.ids)
    return drafter
