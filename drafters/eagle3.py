"""EAGLE-3: one layer over three fused hidden states of the target (arXiv 2503.01840)."""

import torch
from torch import Tensor, nn

from drafters.common import Attend, DraftAttention, DraftShape, RecurrentDrafter
from drafters.vocab import DraftVocab
from specdec.layers import GatedMLP, RMSNorm, Rope
from specdec.model import check_taps


class Eagle3(RecurrentDrafter):
    """The published head. Features of the taps, concatenated low to high, go through `fc`; the layer attends over
    [norm(embedding), norm(hidden)]; its output is fed back *before* the final norm, which only the head sees."""

    def __init__(self, shape: DraftShape, taps: tuple[int, ...], vocab: DraftVocab, embedding: Tensor):
        super().__init__(shape, taps, vocab, embedding)
        h = shape.hidden
        self.fc = nn.Linear(len(taps) * h, h, bias=False)
        self.embed_norm = RMSNorm(h, shape.eps)
        self.hidden_norm = RMSNorm(h, shape.eps)
        self.attention = DraftAttention(shape, 2 * h)
        self.post_norm = RMSNorm(h, shape.eps)
        self.mlp = GatedMLP(h, shape.intermediate)
        self.norm = RMSNorm(h, shape.eps)
        self.head = nn.Linear(h, vocab.size, bias=False)

    def fuse(self, feats: Tensor) -> Tensor:
        return self.fc(feats)

    def layer(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = torch.cat([self.embed_norm(embeds), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.attention(x, rope, attend)
        return hidden + self.mlp(self.post_norm(hidden))

    def predict(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


def default_taps(layers: int) -> tuple[int, int, int]:
    """The published choice, as indices into hidden_states; on a shallow target, where those coincide or leave the
    range, a quarter, the middle and the end."""
    published = (2, layers // 2, layers - 3)
    if 0 < published[0] < published[1] < published[2]:
        return published
    return (max(1, layers // 4), max(1, (layers + 1) // 2), layers)


def create(
    target,
    *,
    vocab: DraftVocab | None = None,
    taps: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    rope_theta: float = 10000.0,
    init: str = "target",
) -> Eagle3:
    """A fresh EAGLE-3 drafter for a target; sizes that are not given are the target's.

    init: 'target' starts from what the target knows (`_start_from_target`), 'random' from nothing. The parameters are
    fp32 whatever the target is, as training wants them.
    """
    config = target.config
    heads = num_attention_heads or config.heads
    shape = DraftShape(
        hidden=config.hidden,
        intermediate=intermediate_size or config.intermediate,
        heads=heads,
        kv_heads=num_key_value_heads or min(config.kv_heads, heads),
        head_dim=config.head_dim,
        eps=config.eps,
        rope=Rope(rope_theta),
        context=config.context,
    )
    vocab = vocab or DraftVocab(config.vocab)
    check_taps(taps or (), config.layers)
    drafter = Eagle3(shape, tuple(taps or default_taps(config.layers)), vocab, target.embed.weight)
    drafter.to(target.embed.weight.device)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        if init == "target":
            _start_from_target(drafter, target)
        elif init != "random":
            raise ValueError(f"init must be 'target' or 'random', got {init!r}")
    return drafter


def _start_from_target(drafter: Eagle3, target) -> None:
    """Let the untrained drafter repeat what the target predicted one token before: the head's rows are the target's,
    and, if the last hidden state is tapped, `fc` passes it through to a head that sees it at its usual scale."""
    vocab, layers, h = drafter.vocab, target.config.layers, drafter.shape.hidden
    drafter.head.weight.copy_(target.head.weight if vocab.ids is None else target.head.weight[vocab.ids])
    if layers in drafter.taps:
        at = drafter.taps.index(layers) * h
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, at : at + h] = torch.eye(h)
        drafter.norm.weight.fill_(target.norm.weight.square().mean().sqrt())
