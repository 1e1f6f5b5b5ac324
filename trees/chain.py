"""A chain: the drafter's best token, `steps` times."""

import torch
from torch import Tensor

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState
from specdec.structs import DraftTree
from specdec.trees.bounds import check_size


class Chain:
    """One path of `steps` drafted tokens; the dynamic tree with topk 1, without its bookkeeping."""

    topk = 1
    samples = False
    marginals = False

    def __init__(self, steps: int = 5):
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        check_size(steps=steps)
        self.steps, self.num_draft_tokens = steps, steps + 1
        self.nodes = torch.arange(steps + 1)
        self.parents = (self.nodes - 1).clamp(min=0)
        self.causal = self.nodes[:, None] >= self.nodes
        self.of_root = torch.zeros(1, 1)  # its log-probability

    def shallower(self, steps: int) -> "Chain":
        return Chain(steps)

    def smaller(self, steps: int) -> "Chain":
        return self.shallower(steps)

    def draft_slots(self) -> int:
        return self.steps - 1

    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        self._move(root.device)
        b, n = len(root), self.num_draft_tokens
        tokens, logq = drafter.chain(state, self.steps, children)
        return DraftTree(
            tokens=torch.cat([root[:, None], tokens], 1),
            parents=self.parents.expand(b, n),
            depth=self.nodes.expand(b, n),
            ancestors=self.causal.expand(b, n, n),
            steps=self.steps,
            logq=torch.cat([self.of_root.expand(b, 1), logq], 1),
        )

    def _move(self, device: torch.device) -> None:
        """Bring the shape to the device of the first root, once."""
        if self.nodes.device != device:
            self.nodes, self.parents, self.causal, self.of_root = (
                x.to(device) for x in (self.nodes, self.parents, self.causal, self.of_root)
            )
