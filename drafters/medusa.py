"""Medusa: heads that guess one, two, three tokens ahead from one hidden state (arXiv 2401.10774)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specdec.contracts import Drafter, DraftState, Features
from specdec.drafters.layers import SharedHead, start
from specdec.drafters.vocab import DraftVocab
from specdec.model.layers import Linear, LinearMap, ModuleList


@dataclass(frozen=True)
class MedusaShape:
    """Size of the hidden state, number of heads, residual blocks in each, and whether each has its own last matrix."""

    hidden: int
    heads: int
    blocks: int = 1
    own_heads: bool = False


class ResidualBlock(nn.Module):
    """x + silu(W x + b)."""

    def __init__(self, hidden: int):
        """Build W [H,H] and b [H]."""
        super().__init__()
        self.linear = Linear(hidden, hidden)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(Drafter):
    """Draft each tree level with its own head, from the target's last hidden state at the root's predecessor (Medusa).

    The head does not see what was drafted in between, so all nodes of a level propose the same children. The drafter
    has no cache. The matrix from hidden states to logits is each head's own, as in the paper's first version, or the
    target's.
    """

    heads: "ModuleList[LinearMap]"
    blocks: "ModuleList[Any]"  # of `ResidualBlock`s
    head: LinearMap
    capturable = True
    learns = True

    def __init__(self, shape: MedusaShape, tap: int, vocab: DraftVocab, head: Tensor):
        """tap: the target's number of layers. head [V,H]: the target's."""
        super().__init__()
        self.shape, self.taps, self.vocab, self.max_steps = shape, (tap,), vocab, shape.heads
        blocks = (
            nn.Sequential(*(ResidualBlock(shape.hidden) for _ in range(shape.blocks))) for _ in range(shape.heads)
        )
        self.blocks = ModuleList(blocks)
        if shape.own_heads:
            self.heads = ModuleList(Linear(shape.hidden, vocab.size, bias=False) for _ in range(shape.heads))
        else:
            self.head = SharedHead(head, vocab.ids)

    def head_of(self, level: int) -> LinearMap:
        """Return the map from hidden states to logits of a tree level."""
        return self.heads[level] if self.shape.own_heads else self.head

    @override
    def heads_in_use(self) -> list[LinearMap]:
        return list(self.heads) if self.shape.own_heads else [self.head]

    @override
    def set_heads(self, heads: list[LinearMap]) -> None:
        if self.shape.own_heads:
            self.heads = ModuleList(heads)
        else:
            self.head = heads[0]

    def guess(self, hidden: Tensor, level: int, width: int = 1) -> DraftState:
        """The root's hidden state [B,1,H] -> the state of `width` nodes of tree level `level` (0: the root's)."""
        readout = self.blocks[level](hidden)
        return DraftState(hidden.expand(-1, width, -1), readout.expand(-1, width, -1), self.head_of(level))

    @override
    def extend(self, feats: Features, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        last = (n - 1).clamp_(min=0)
        feats = feats.to(self.head_of(0).weight.dtype)  # the drafter's may be narrower than the target's
        hidden = feats.gather(1, last[:, None, None].expand(-1, 1, feats.shape[-1]))
        return self.guess(hidden, 0)

    @override
    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        return self.guess(hidden[:, :1], level, tokens.shape[1])  # the hidden state of all nodes is the root's

    @override
    def unroll(self, feats: Tensor, tokens: Tensor, steps: int, needed: Tensor | None = None) -> Iterator[DraftState]:
        if steps > self.shape.heads:
            raise ValueError(f"objective.steps is {steps}, but there are {self.shape.heads} Medusa heads only")
        for level in range(steps):
            yield DraftState(feats, self.blocks[level](feats), self.head_of(level))

    def start_from(self, target) -> None:
        """Every head begins as the target's own."""
        for block in self.blocks.modules():
            if isinstance(block, nn.Linear):
                block.weight.zero_()
        if self.shape.own_heads:
            ids = self.vocab.ids
            for head in self.heads:
                head.weight.copy_(target.head.weight if ids is None else target.head.weight[ids])


def create(
    target,
    *,
    vocab: DraftVocab | None = None,
    heads: int = 5,
    blocks: int = 1,
    own_heads: bool = False,
    init: str = "target",
) -> Medusa:
    """Fresh Medusa heads for a target; init: see `layers.start`."""
    if heads < 1 or blocks < 1:
        raise ValueError(f"heads and blocks must be at least 1, got {heads} and {blocks}")
    config = target.config
    shape = MedusaShape(config.hidden, heads, blocks, own_heads)
    drafter = Medusa(shape, config.layers, vocab or DraftVocab(config.vocab), target.head.weight)
    start(drafter, target, init)
    return drafter
