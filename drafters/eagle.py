"""EAGLE-1 and EAGLE-2: one layer that predicts the target's next feature (arXiv 2401.15077; 2406.16858 is a tree)."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from specdec.drafters.layers import DraftShape, SharedHead, shape_like, start
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.vocab import DraftVocab
from specdec.model.attention import Attend, Attention
from specdec.model.layers import GatedMLP, Linear, RMSNorm


class Eagle(RecurrentDrafter):
    """Draft with the published EAGLE-1/2 head, which predicts the target's next hidden state, after the final norm.

    `fc` joins [embedding, feature], and the layer has no norm before its attention. The target's own head makes logits
    of the layer's output without another norm, and the output is fed back as it is.
    """

    def __init__(
        self,
        shape: DraftShape,
        tap: int,
        vocab: DraftVocab,
        embedding: Tensor,
        head: Tensor,
        fc_bias: bool = True,
        qkv_bias: bool = False,
    ):
        """tap: the target's number of layers. embedding, head [V,H]: the target's, shared and frozen."""
        super().__init__(shape, (tap,), vocab, embedding)
        h = shape.hidden
        self.fc = Linear(2 * h, h, bias=fc_bias)
        self.attention = Attention(shape, h, bias=qkv_bias)
        self.post_norm = RMSNorm(h, shape.eps)
        self.mlp = GatedMLP(h, shape.intermediate)
        self.head = SharedHead(head, vocab.ids)
        self.own_embedding = False  # True: the embedding is not the target's, and is saved with the head

    @override
    def fuse(self, feats: Tensor) -> Tensor:
        return feats

    @override
    def layer(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, index: int) -> Tensor:
        x = self.fc(torch.cat([embeds, hidden], dim=-1))
        x, normed = self.attention.add(x, x, self.post_norm, rope, attend)
        return x + self.mlp(normed)

    def start_from(self, target) -> None:
        """Initialise `fc` so that the feature passes through, and the first guess is near the target's last prediction.

        The embedding is added through a random rotation at half the feature's size, because a small one would learn
        slowly.
        """
        h, embedding = self.shape.hidden, self.embedding.float()
        loudness = (0.5 * target.final_scale() / embedding.square().mean().sqrt()).item()
        self.fc.weight[:, :h] = nn.init.orthogonal_(torch.empty(h, h)) * loudness
        self.fc.weight[:, h:] = torch.eye(h)


def create(target, *, vocab: DraftVocab | None = None, fc_bias: bool = True, init: str = "target", **shape) -> Eagle:
    """A fresh EAGLE-1/2 drafter for a target. shape: sizes as in `layers.shape_like`; init: see `layers.start`."""
    config = target.config
    vocab, ends = vocab or DraftVocab(config.vocab), (target.embed.weight, target.head.weight)
    drafter = Eagle(shape_like(target, **shape), config.layers, vocab, *ends, fc_bias=fc_bias)
    start(drafter, target, init)
    return drafter
