"""A chain: the drafter's most likely token, `steps` times."""

import torch
import torch.nn.functional as F
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

    def shallower(self, steps: int) -> "Chain":
        return Chain(steps)

    def draft_slots(self) -> int:
        return self.steps - 1

    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, sampling=None, generator=None) -> DraftTree:
        b, n, device = len(root), self.num_draft_tokens, root.device
        tokens, logq = drafter.chain(state, self.steps)
        nodes = torch.arange(n, device=device).expand(b, n)
        return DraftTree(
            tokens=torch.cat([root[:, None], tokens], 1),
            parents=(nodes - 1).clamp(min=0),
            depth=nodes,
            ancestors=torch.ones(n, n, dtype=torch.bool, device=device).tril().expand(b, n, n),
            steps=self.steps,
            logq=F.pad(logq, (1, 0)),
        )
