"""The EAGLE-2 dynamic tree: expand the most likely nodes level by level, then keep the best of all candidates."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState
from specdec.ops import kernel_for
from specdec.recording import NOWHERE, Accepted, Recording
from specdec.structs import DraftTree
from specdec.trees.base import Tree, ancestors_of, check_nodes, check_shape, check_size, shape_in

WIDEST = 32  # topk that the kernel `tree_level` takes
MOST, MOST_NODES = 4096, 256  # candidates and nodes that the kernel `tree_select` takes
NODES = 16  # the default, or all candidates if there are fewer

if TYPE_CHECKING:
    NodeCount = Any  # a number once the tree is made
else:
    NodeCount = int | None


class Pool(NamedTuple):
    """Hold all drafted candidates in breadth-first order, the children of a node together, best first.

    There are M = W + (D-1) W^2 candidates. The first part is what fewer steps would have drafted: no level depends on
    the number of levels after it.
    """

    tokens: Tensor  # [B,M] target vocabulary ids
    scores: Tensor  # [B,M] log-probability of the path under the drafter
    parents: Tensor  # [B,M] 1 + the parent's place in the pool; 0 for children of the root


class _Beginning(Tree):
    """What every dynamic tree of one topk begins with, on the device of the first state."""

    no_parents: Tensor  # the first level's, as `Pool` names them
    first_places: Tensor
    itself: Tensor


@dataclass(frozen=True, order=True)
class DynamicTree(_Beginning):
    """Expand, accumulate, rerank (EAGLE-2, arXiv 2406.16858). Written 4/5/16.

    `steps` levels are drafted; on each, the `topk` best nodes propose `topk` children; of all candidates the
    `num_draft_tokens` - 1 with the highest path probability and the root make the tree. These are SGLang's words;
    EAGLE's (total_token T, depth d, top_k k) is (num_draft_tokens T, steps d+1, topk k).
    """

    topk: int = 4
    steps: int = 5
    num_draft_tokens: NodeCount = None  # a number from here on

    def __post_init__(self) -> None:
        """Check the sizes, and choose `num_draft_tokens` if it is None."""
        check_shape(self.topk, self.steps)
        candidates = self.candidates(self.topk, self.steps)
        if self.num_draft_tokens is None:
            vars(self)["num_draft_tokens"] = min(NODES, candidates + 1)
        check_size(self.topk, self.steps, self.num_draft_tokens, candidates)
        check_nodes(self.topk, self.steps, self.num_draft_tokens, candidates + 1)
        vars(self).update(
            no_parents=torch.zeros(self.topk, dtype=torch.int64),
            first_places=torch.arange(1, self.topk + 1),
            itself=torch.eye(self.topk, dtype=torch.bool),
        )

    @classmethod
    @override
    def parse(cls, text: str) -> "DynamicTree | None":
        shape = shape_in(text)
        return None if shape is None or shape[0] == 1 else cls(*shape)

    @staticmethod
    def candidates(topk: int, steps: int) -> int:
        """Nodes that are drafted, the root not counted: topk on the first level, topk squared on each further one."""
        return topk + (steps - 1) * topk * topk

    @override
    def smaller(self, steps: int) -> "DynamicTree":
        return DynamicTree(self.topk, steps, min(self.num_draft_tokens, self.candidates(self.topk, steps) + 1))

    @override
    def draft_slots(self) -> int:
        return self.topk * (self.steps - 1)

    @override
    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        return self.select(root, self.expand(drafter, state, children))

    def select(self, root: Tensor, pool: Pool) -> DraftTree:
        """The tree of the root and the best candidates."""
        return select(root, pool, self.num_draft_tokens, self.steps)

    def expand(self, drafter: Drafter, state: DraftState, children: Children = LIKELIEST) -> Pool:
        """Draft all candidates after the state's position (W = 1)."""
        w, b = self.topk, len(state.hidden)
        self.move(state.hidden.device)
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

    def replay(self, recording: Recording) -> Accepted:
        """A text runs through a pool along one path at most, and the tree keeps what has a high enough rank."""
        drafts = recording.levels(self.steps) > 0
        if (name := f"dynamic.{self.topk}") not in recording.tensors:
            known = ", ".join(other[8:] for other in recording.tensors if other.startswith("dynamic."))
            raise ValueError(f"topk {self.topk} was not recorded; recorded were {known or 'none'}")
        best_nodes = recording.tensors[name][:, self.steps - 1] < self.num_draft_tokens - 1
        return Accepted(best_nodes.sum(1) * drafts, torch.where(drafts, self.num_draft_tokens, 1), self.steps * drafts)

    def ranks_along(self, pool: Pool, following: Tensor) -> Tensor:
        """Return the ranks by path score of the nodes along the texts `following` [B,D].

        Element [b,l,d] of the result [B,D,D] is the rank of the text's node at depth d + 1 among all nodes of the first
        l + 1 levels, or NOWHERE if there is no such node.
        """
        ends = [self.candidates(self.topk, depth) for depth in range(1, self.steps + 1)]
        hit, found = follow(pool, [slice(*level) for level in pairwise([0, *ends])], following), []
        for count in ends:
            order = best_first(pool.scores[:, :count])
            rank = torch.empty_like(order).scatter_(1, order, torch.arange(count, device=order.device).expand_as(order))
            there = (hit >= 0) & (hit < count)
            found.append(torch.where(there, rank.gather(1, torch.where(there, hit, 0)), NOWHERE))
        return torch.stack(found, 1)


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
    best first, scores, tokens, which of the nodes each is a child of, places [B,W], and ancestors [B,W,C+W].
    """
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
    """Select the root [B] and the N - 1 best candidates of a `Pool`, of which none is deeper than `steps`.

    Returns tokens, parents and depth [B,N], ancestors [B,N,N] and scores [B,N] of the tree, where N is `nodes`.
    """
    best_nodes = best_first(scores)[:, : nodes - 1].sort(dim=1).values  # breadth first again
    places = F.pad(best_nodes + 1, (1, 0))  # as parents name them, the root among them: ascending, for searchsorted
    tree_parents = F.pad(torch.searchsorted(places, parents.gather(1, best_nodes)), (1, 0))
    ancestors = ancestors_of(tree_parents, steps)
    tokens = torch.cat([root[:, None], tokens.gather(1, best_nodes)], 1)
    return tokens, tree_parents, ancestors.sum(-1) - 1, ancestors, F.pad(scores.gather(1, best_nodes), (1, 0))


def best_first(scores: Tensor) -> Tensor:
    """Places [B,M] of a pool's candidates by scores [B,M]: a tree of N nodes keeps the first N-1.

    A child never scores above its parent, and follows it in the pool: in a *stable* descending sort no child
    precedes its parent, even among equal scores, so every selection is closed under parents.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices


def follow(pool: Pool, levels: Sequence[slice], following: Tensor, best_nodes: Tensor | None = None) -> Tensor:
    """Return where a text runs through a pool: the place at each depth of the child that is its token, [B,D], or -1.

    levels: of the pool, one for each depth. following [B,>=D]: the text's tokens after each root. best_nodes [B,M]: the
    candidates that count; None: all.
    """
    node = following.new_zeros(len(following))  # counted as `parents` counts: 0 is the root
    found = []
    for depth, level in enumerate(levels):
        match = pool.parents[:, level] == node[:, None]
        match &= pool.tokens[:, level] == following[:, depth : depth + 1]
        if best_nodes is not None:
            match &= best_nodes[:, level]
        found.append(torch.where(match.any(1), match.int().argmax(1) + level.start, -1))
        node = torch.where(found[-1] < 0, -1, found[-1] + 1)
    return torch.stack(found, 1)
