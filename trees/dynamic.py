"""The EAGLE-2 dynamic tree: expand the most likely nodes level by level, then keep the best of all candidates."""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState
from specdec.ops import kernel_for
from specdec.structs import DraftTree
from specdec.trees.ancestors import ancestors_of
from specdec.trees.bounds import check_nodes, check_shape, check_size

WIDEST = 32  # topk that the kernel `tree_level` takes
MOST, MOST_NODES = 4096, 256  # candidates and nodes that the kernel `tree_select` takes


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
    marginals = False

    def __init__(self, topk: int = 4, steps: int = 5, num_draft_tokens: int = 16):
        check_shape(topk, steps)
        candidates = self.candidates(topk, steps)
        check_size(topk, steps, num_draft_tokens, candidates)
        check_nodes(topk, steps, num_draft_tokens, candidates + 1)
        self.topk, self.steps, self.num_draft_tokens = topk, steps, num_draft_tokens
        self.no_parents = torch.zeros(topk, dtype=torch.int64)  # the first level's, as `Pool` names them
        self.first_places, self.itself = torch.arange(1, topk + 1), torch.eye(topk, dtype=torch.bool)

    @staticmethod
    def candidates(topk: int, steps: int) -> int:
        """Nodes that are drafted, the root not counted: topk on the first level, topk squared on each further one."""
        return topk + (steps - 1) * topk * topk

    def shallower(self, steps: int) -> "DynamicTree":
        return self  # which nodes of a level are kept depends on the levels behind it

    def smaller(self, steps: int) -> "DynamicTree":
        return DynamicTree(self.topk, steps, min(self.num_draft_tokens, self.candidates(self.topk, steps) + 1))

    def draft_slots(self) -> int:
        return self.topk * (self.steps - 1)

    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        return self.select(root, self.expand(drafter, state, children))

    def expand(self, drafter: Drafter, state: DraftState, children: Children = LIKELIEST) -> Pool:
        """Draft all candidates behind the state's position (W = 1)."""
        w, b = self.topk, len(state.hidden)
        self._move(state.hidden.device)
        first, state = state, drafter.root(state)
        scores, draft_ids = children.best(state, drafter.vocab, 0, w)  # [B,1,W]
        scores, tokens = scores[:, 0], drafter.vocab.to_target(draft_ids[:, 0])
        pool_tokens, pool_scores, pool_parents = [tokens], [scores], [self.no_parents.expand(b, w)]
        hidden = state.hidden.expand(b, w, -1)
        places, ancestors = self.first_places.expand(b, w), self.itself.expand(b, w, w)
        choose = (kernel_for("tree_level", scores) if w <= WIDEST else None) or partial(next_level, self.itself)
        for level in range(1, self.steps):
            state = drafter.expand(first, tokens, hidden, level, ancestors)
            gains, draft_ids = children.best(state, drafter.vocab, level, w)
            below = drafter.vocab.to_target(draft_ids)
            start, last = 1 + self.candidates(w, level), level + 1 == self.steps
            every, parents, *best = choose(scores, places, ancestors, gains, below, start, 0 if last else w)
            pool_tokens.append(below.flatten(1))
            pool_scores.append(every)
            pool_parents.append(parents)
            if not last:
                scores, tokens, parent, places, ancestors = best
                hidden = state.hidden.gather(1, parent[..., None].expand(-1, -1, state.hidden.shape[-1]))
        return Pool(*(torch.cat(parts, 1) for parts in (pool_tokens, pool_scores, pool_parents)))

    def select(self, root: Tensor, pool: Pool) -> DraftTree:
        """The tree of the root and the best candidates."""
        return select(root, pool, self.num_draft_tokens, self.steps)

    def _move(self, device: torch.device) -> None:
        """Bring what every tree begins with to the device of the first state, once."""
        if self.no_parents.device != device:
            self.no_parents, self.first_places, self.itself = (
                x.to(device) for x in (self.no_parents, self.first_places, self.itself)
            )


def select(root: Tensor, pool: Pool, nodes: int, steps: int) -> DraftTree:
    """The tree of root [B] and the best of a pool, `nodes` in all and no deeper than `steps`."""
    fits = nodes <= MOST_NODES and pool.scores.shape[1] <= MOST
    choose = (kernel_for("tree_select", pool.scores) if fits else None) or best_tree
    tokens, parents, depth, ancestors, logq = choose(root, *pool, nodes, steps)
    return DraftTree(tokens, parents, depth, ancestors, steps, logq)


def next_level(
    itself: Tensor,
    scores: Tensor,
    places: Tensor,
    ancestors: Tensor,
    gains: Tensor,
    tokens: Tensor,
    start: int,
    count: int,
) -> tuple[Tensor, ...]:
    """The children of W nodes, and the best W of them, or none if `count` is 0.

    Of the nodes: path scores [B,W], places as parents are named in `Pool` [B,W], and which of C positions each sees,
    ancestors [B,W,C]. Of their children: log-probabilities gains [B,W,W] and tokens [B,W,W]. start: the first child's
    place. itself: ones on the diagonal [W,W]. Returns of all children scores and parents [B,W*W], and of the best ones,
    best first, scores, tokens, which of the nodes each is a child of, places [B,W], and ancestors [B,W,C+W]."""
    every = (scores[..., None] + gains).flatten(1)
    parents = places[..., None].expand_as(gains).flatten(1)
    if count == 0:
        return every, parents
    scores, chosen = every.topk(count)
    parent = chosen // gains.shape[2]
    inherited = ancestors.gather(1, parent[..., None].expand(-1, -1, ancestors.shape[2]))
    ancestors = torch.cat([inherited, itself.expand(len(every), -1, -1)], 2)
    return every, parents, scores, tokens.flatten(1).gather(1, chosen), parent, start + chosen, ancestors


def best_tree(
    root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int, steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """root [B] and the parts of a `Pool` [B,M], no deeper than `steps` -> tokens, parents and depth [B,N], ancestors
    [B,N,N] and scores [B,N] of the tree of the root and the N - 1 best candidates."""
    kept = best_first(scores)[:, : nodes - 1].sort(dim=1).values  # breadth first again
    places = F.pad(kept + 1, (1, 0))  # as parents name them, the root among them: ascending, so a node is a search
    tree_parents = F.pad(torch.searchsorted(places, parents.gather(1, kept)), (1, 0))
    ancestors = ancestors_of(tree_parents, steps)
    tokens = torch.cat([root[:, None], tokens.gather(1, kept)], 1)
    return tokens, tree_parents, ancestors.sum(-1) - 1, ancestors, F.pad(scores.gather(1, kept), (1, 0))


def best_first(scores: Tensor) -> Tensor:
    """Places [B,M] of a pool's candidates by scores [B,M]: a tree of N nodes keeps the first N-1.

    A child never scores above its parent, and stands behind it in the pool: in a *stable* descending sort no child
    precedes its parent, even among equal scores, so every selection is closed under parents.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices
