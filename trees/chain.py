"""A chain: the drafter's best token, `steps` times."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState
from specdec.structs import DraftTree
from specdec.trees.base import check_chains, check_size, shape_in
from specdec.trees.static import FixedTree


@dataclass(frozen=True, order=True)
class Chain(FixedTree):
    """One path of `steps` drafted tokens; the dynamic tree with topk 1, without its bookkeeping. Written 1/5/6."""

    steps: int = 5

    def __post_init__(self) -> None:
        """Check `steps` and compute the shape."""
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        check_size(steps=self.steps)
        self._shape([(0,) * depth for depth in range(1, self.steps + 1)], [1] * self.steps)

    @classmethod
    @override
    def parse(cls, text: str) -> "Chain | None":
        shape = shape_in(text)
        if shape is None or shape[0] != 1:
            return None
        check_chains(*shape)
        return cls(shape[1])

    @override
    def shallower(self, steps: int) -> "Chain":
        return Chain(steps)

    @override
    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        self._move(root.device)
        tokens, logq = drafter.chain(state, self.steps, children)
        logq = torch.cat([self.of_root.expand(len(root), 1), logq], 1)
        return self._tree(torch.cat([root[:, None], tokens], 1), logq)
