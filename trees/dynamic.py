"""The EAGLE-2 dynamic tree: expand the most likely nodes level by level, then keep the best of all candidates."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.contracts import Drafter, DraftState
from specdec.types import DraftTree
from trees.ancestors import ancestors_of


class Pool(NamedTuple):
    """All that was drafted, in breadth-first order: M = W + (D-1) W^2 candidates, the children of a node together, best
    first. What fewer steps would have drafted is the first part of it: no level depends on how many follow."""

    tokens: Tensor  # [B,M] target vocabulary ids
    scores: Tensor  # [B,M] log-probability of the path under the drafter
    parents: Tensor  # [B,M] 1 + the parent's place in the pool; 0 for children of the root


class DynamicTree:
    """Expand, accumulate, rerank (EAGLE-2, arXiv 2406.16858).

    `steps` levels are drafted; on each, the `topk` best nodes propose `topk` children; of all candidates the
    `num_draft_tokens` - 1 with the highest path probability and the root make the tree. These are SGLang's words;
    EAGLE's (total_token T, depth d, top_k k) is (num_draft_tokens T, steps d+1, topk k).
    """

    samples = False

    def __init__(self, topk: int = 4, steps: int = 5, num_draft_tokens: int = 16):
        if topk < 1 or steps < 1:
            raise ValueError(f"topk and steps must be at least 1, got topk {topk} and steps {steps}")
        candidates = self.candidates(topk, steps)
        if not 2 <= num_draft_tokens <= candidates + 1:
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens}, but with topk {topk} and steps {steps} a tree holds 2 to "
                f"{candidates + 1} tokens, the root counted"
            )
        self.topk, self.steps, self.num_draft_tokens = topk, steps, num_draft_tokens

    @staticmethod
    def candidates(topk: int, steps: int) -> int:
        """Nodes that are drafted, the root not counted: topk on the first level, topk squared on each further one."""
        return topk + (steps - 1) * topk * topk

    def shallower(self, steps: int) -> "DynamicTree":
        return self  # which nodes of a level are kept depends on the levels behind it

    def draft_slots(self) -> int:
        return self.topk * (self.steps - 1)

    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, sampling=None, generator=None) -> DraftTree:
        return self.select(root, self.expand(drafter, state))

    def expand(self, drafter: Drafter, state: DraftState) -> Pool:
        """Draft all candidates behind the state's position (W = 1)."""
        w = self.topk
        b = len(state.hidden)
        device = state.hidden.device
        slots = torch.arange(w, device=device)
        first, state = state, drafter.root(state)
        scores, draft_ids = state.top(w)  # [B,1,W]
        scores, tokens = scores[:, 0], drafter.vocab.to_target(draft_ids[:, 0])
        pool_tokens, pool_scores = [tokens], [scores]
        pool_parents = [torch.zeros(b, w, dtype=torch.int64, device=device)]
        hidden = state.hidden.expand(b, w, -1)
        places = slots.expand(b, w)  # of the frontier in the pool
        eye = torch.eye(w, dtype=torch.bool, device=device).expand(b, w, w)
        ancestors = eye
        for level in range(1, self.steps):
            state = drafter.expand(first, tokens, hidden, level, ancestors)
            gains, draft_ids = state.top(w)
            candidate_scores = (scores[..., None] + gains).flatten(1)  # [B,W*W]
            candidate_tokens = drafter.vocab.to_target(draft_ids).flatten(1)
            pool_scores.append(candidate_scores)
            pool_tokens.append(candidate_tokens)
            pool_parents.append((1 + places).repeat_interleave(w, dim=1))
            if level + 1 < self.steps:
                scores, chosen = candidate_scores.topk(w)
                parent = chosen // w
                tokens = candidate_tokens.gather(1, chosen)
                hidden = state.hidden.gather(1, parent[..., None].expand(-1, -1, state.hidden.shape[-1]))
                inherited = ancestors.gather(1, parent[..., None].expand(-1, -1, ancestors.shape[-1]))
                ancestors = torch.cat([inherited, eye], dim=2)
                places = w + (level - 1) * w * w + chosen
        return Pool(torch.cat(pool_tokens, 1), torch.cat(pool_scores, 1), torch.cat(pool_parents, 1))

    def select(self, root: Tensor, pool: Pool) -> DraftTree:
        """The tree of the root and the best candidates."""
        tokens, scores, parents = pool
        kept = best_first(scores)[:, : self.num_draft_tokens - 1].sort(dim=1).values  # breadth first again
        nodes = F.pad(kept + 1, (1, 0))  # as parents name them, the root among them: ascending, so a place is a search
        tree_parents = F.pad(torch.searchsorted(nodes, parents.gather(1, kept)), (1, 0))
        ancestors = ancestors_of(tree_parents, self.steps)
        return DraftTree(
            tokens=torch.cat([root[:, None], tokens.gather(1, kept)], 1),
            parents=tree_parents,
            depth=ancestors.sum(-1) - 1,
            ancestors=ancestors,
            steps=self.steps,
            logq=F.pad(scores.gather(1, kept), (1, 0)),
        )


def best_first(scores: Tensor) -> Tensor:
    """Places [B,M] of a pool's candidates by scores [B,M]: a tree of N nodes keeps the first N-1.

    A child never scores above its parent, and stands behind it in the pool: in a *stable* descending sort no child
    precedes its parent, even among equal scores, so every selection is closed under parents.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices
