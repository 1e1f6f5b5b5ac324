"""A chain: the drafter's most likely token, `steps` times."""

import torch
from torch import Tensor

from specdec.contracts import Drafter, DraftState
from specdec.types import DraftTree


class Chain:
    """One path of `steps` drafted tokens; the dynamic tree with topk 1, without its bookkeeping."""

    topk = 1
    samples = False

    def __init__(self, steps: int = 5):
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        self.steps, self.num_draft_tokens = steps, steps + 1
        self.nodes = torch.arange(steps + 1)
        self.parents = (self.nodes - 1).clamp(min=0)
        self.causal = self.nodes[:, None] >= self.nodes

    def draft_slots(self) -> int:
        return self.steps - 1

    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, sampling=None, generator=None) -> DraftTree:
        self._move(root.device)
        b, n = len(root), self.num_draft_tokens
        causal = self.causal.expand(b, n, n)
        tokens, logq = [root[:, None]], [torch.zeros(b, 1, device=root.device)]
        first, state = state, drafter.root(state)
        for level in range(1, self.steps + 1):
            best, draft_id = (x.squeeze(-1) for x in state.top(1))  # [B,1]
            tokens.append(drafter.vocab.to_target(draft_id))
            logq.append(logq[-1] + best)
            if level < self.steps:
                state = drafter.expand(first, tokens[-1], state.hidden, level, causal[:, level - 1 : level, :level])
        return DraftTree(
            tokens=torch.cat(tokens, 1),
            parents=self.parents.expand(b, n),
            depth=self.nodes.expand(b, n),
            ancestors=causal,
            steps=self.steps,
            logq=torch.cat(logq, 1),
        )

    def _move(self, device: torch.device) -> None:
        """Bring the shape to the device of the first root, once."""
        if self.nodes.device != device:
            self.nodes, self.parents, self.causal = (x.to(device) for x in (self.nodes, self.parents, self.causal))
