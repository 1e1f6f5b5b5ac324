"""A chain: the drafter's best token, `steps` times."""

import torch
from torch import Tensor

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState
from specdec.structs import DraftTree
from specdec.trees.bounds import check_size
from specdec.trees.static import FixedTree


class Chain(FixedTree):
    """One path of `steps` drafted tokens; the dynamic tree with topk 1, without its bookkeeping."""

    def __init__(self, steps: int = 5):
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        check_size(steps=steps)
        super().__init__([(0,) * depth for depth in range(1, steps + 1)], [1] * steps)

    def shallower(self, steps: int) -> "Chain":
        return Chain(steps)

    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        self._move(root.device)
        tokens, logq = drafter.chain(state, self.steps, children)
        logq = torch.cat([self.of_root.expand(len(root), 1), logq], 1)
        return self._tree(torch.cat([root[:, None], tokens], 1), logq)
