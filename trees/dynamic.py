"""The EAGLE-2 dynamic tree: expand the most likely nodes level by level, then keep the best of all candidates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState
from specdec.kernels import kernel_for
from specdec.recording import NOWHERE, Accepted, Recording
from specdec.structs import DraftTree
from specdec.trees.ancestors import ancestors_of
from specdec.trees.base import Tree, shape_in
from specdec.trees.bounds import check_nodes, check_shape, check_size

WIDEST = 32  # topk that the kernel `tree_level` takes
MOST, MOST_NODES = 4096, 256  # candidates and nodes that the kernel `tree_select` takes
NODES = 16  # unless told otherwise, or as many as there are

# A truncation rule. It takes the path log-probabilities of all candidates level by level, [R,W], [R,W^2], ..., and
# returns how many levels are drafted, [R], at least 1, and how many nodes are verified at most, [R], the root counted.
Rule = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]


class Pool(NamedTuple):
    """All that was drafted, in breadth-first order: M = W + (D-1) W^2 candidates, the children of a node together, best
    first. What fewer steps would have drafted is the first part of it: no level depends on how many follow."""

    tokens: Tensor  # [B,M] target vocabulary ids
    scores: Tensor  # [B,M] log-probability of the path under the drafter
    parents: Tensor  # [B,M] 1 + the parent's place in the pool; 0 for children of the root


@dataclass(frozen=True, order=True)
class DynamicTree(Tree):
    """Expand, accumulate, rerank (EAGLE-2, arXiv 2406.16858). Written 4/5/16.

    `steps` levels are drafted; on each, the `topk` best nodes propose `topk` children; of all candidates the
    `num_draft_tokens` - 1 with the highest path probability and the root make the tree. These are SGLang's words;
    EAGLE's (total_token T, depth d, top_k k) is (num_draft_tokens T, steps d+1, topk k).
    """

    topk: int = 4
    steps: int = 5
    num_draft_tokens: int | None = None  # a number from here on

    def __post_init__(self) -> None:
        check_shape(self.topk, self.steps)
        candidates = self.candidates(self.topk, self.steps)
        if self.num_draft_tokens is None:
            vars(self)["num_draft_tokens"] = min(NODES, candidates + 1)
        check_size(self.topk, self.steps, self.num_draft_tokens, candidates)
        check_nodes(self.topk, self.steps, self.num_draft_tokens, candidates + 1)
        vars(self).update(
            no_parents=torch.zeros(self.topk, dtype=torch.int64),  # the first level's, as `Pool` names them
            first_places=torch.arange(1, self.topk + 1),
            itself=torch.eye(self.topk, dtype=torch.bool),
        )

    @classmethod
    def parse(cls, text: str) -> "DynamicTree | None":
        shape = shape_in(text)
        return None if shape is None or shape[0] == 1 else cls(*shape)

    @staticmethod
    def candidates(topk: int, steps: int) -> int:
        """Nodes that are drafted, the root not counted: topk on the first level, topk squared on each further one."""
        return topk + (steps - 1) * topk * topk

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

    def replay(self, recording: Recording, rule: Rule | None = None) -> Accepted:
        """A text runs through a pool along one path at most, and the tree keeps what has a high enough rank.

        rule: cuts the tree at each root."""
        drafts = recording.levels(self.steps) > 0
        pool = recorded_pool(recording.tensors, self.topk)
        make = partial(_ranks_along, pool, self.topk, recording)
        hit, children = recording.derived(f"ranks {self.topk}", make)
        levels, budget = (torch.full((len(hit),), size) for size in (self.steps, self.num_draft_tokens))
        if rule is not None:
            levels, most = rule([pool.scores[:, level] for level in _levels(self.topk, self.steps)])
            if levels.min() < 1 or levels.max() > self.steps or most.min() < 1:
                raise ValueError(f"a truncation rule must keep 1 to {self.steps} levels and at least the root")
            budget = torch.minimum(budget, most).minimum(1 + self.topk + (levels - 1) * self.topk**2)
        row = torch.arange(len(hit))
        kept = hit[row, levels - 1] < (budget - 1)[:, None]  # [R,D]: is the text's node of this depth in the tree?
        children = children[row, levels - 1] < (budget - 1)[:, None, None]
        expected = recording.expectation(recording.tensors.get(f"pool.{self.topk}.p"), kept, children)
        expected = None if expected is None else torch.where(drafts, expected, 1)
        return Accepted(kept.sum(1) * drafts, expected, torch.where(drafts, budget, 1), levels * drafts)

    def _move(self, device: torch.device) -> None:
        """Bring what every tree begins with to the device of the first state, once."""
        if self.no_parents.device != device:
            names = "no_parents", "first_places", "itself"
            vars(self).update({name: getattr(self, name).to(device) for name in names})


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


# Replay


def recorded_pool(tensors: dict[str, Tensor], topk: int) -> Pool:
    """The pool of a `Recording`. Raises ValueError if none was recorded."""
    if f"pool.{topk}.tokens" not in tensors:
        known = ", ".join(name.split(".")[1] for name in tensors if name.endswith(".tokens") and name[:4] == "pool")
        raise ValueError(f"topk {topk} was not recorded; recorded were {known or 'none'}")
    return Pool(*(tensors[f"pool.{topk}.{part}"] for part in Pool._fields))


def _levels(topk: int, steps: int) -> list[slice]:
    """Where the levels of a pool lie."""
    return [slice(*ends) for ends in pairwise([0, *(DynamicTree.candidates(topk, d) for d in range(1, steps + 1))])]


def follow(
    pool: Pool, levels: Sequence[slice], following: Tensor, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Where a text runs through a pool.

    levels: of the pool, one for each depth. following [R,>=D]: the text's tokens behind each root. kept [R,M]: the
    candidates that count; None: all.

    Returns three tensors [R,D]: the place of the first child of the text's node above each depth, and the place of the
    child that is the text's token, -1 where there is none; and how many children that node has."""
    node = torch.zeros(len(following), dtype=pool.parents.dtype)  # counted as `parents` counts: 0 is the root
    found = []
    for depth, level in enumerate(levels):
        child = pool.parents[:, level] == node[:, None]
        if kept is not None:
            child &= kept[:, level]
        match = child & (pool.tokens[:, level] == following[:, depth : depth + 1])
        first, hit = (torch.where(x.any(1), x.int().argmax(1) + level.start, -1) for x in (child, match))
        found.append((first, hit, child.sum(1)))
        node = torch.where(hit < 0, -1, hit + 1)
    return tuple(torch.stack(parts, 1) for parts in zip(*found, strict=True))


def children_along(
    tensors: dict[str, Tensor], topk: int, steps: int, following: Tensor, here: slice
) -> tuple[Tensor, Tensor]:
    """The candidates to be the text's next node at each depth, [R,D,W], and whether there are any, [R,D,1]; here: of
    the roots."""
    pool = Pool(*(part[here] for part in recorded_pool(tensors, topk)))
    first, *_ = follow(pool, _levels(topk, steps), following)
    places = first.clamp(min=0)[..., None] + torch.arange(topk)
    return pool.tokens.gather(1, places.flatten(1)).long().view(places.shape), (first >= 0)[..., None]


def _ranks_along(pool: Pool, topk: int, recording: Recording) -> tuple[Tensor, Tensor]:
    """Ranks by path score among all of the first 1, 2, ... levels: [R,D,D] of the nodes that the text runs through, by
    depth, and [R,D,D,W] of the candidates to be the next node; NOWHERE where there is none."""
    first, hit, _ = follow(pool, _levels(topk, recording.steps), recording.following)
    children = torch.where(first[..., None] < 0, -1, first[..., None] + torch.arange(topk))
    places = torch.cat([hit[..., None], children], -1).flatten(1)  # [R,D*(1+W)]
    found = []
    for steps in range(1, recording.steps + 1):
        count = DynamicTree.candidates(topk, steps)
        order = best_first(pool.scores[:, :count])
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(count).expand_as(order))
        there = (places >= 0) & (places < count)
        found.append(torch.where(there, rank.gather(1, torch.where(there, places, 0)), NOWHERE).int())
    ranks = torch.stack(found, 1).unflatten(2, (recording.steps, 1 + topk))
    return ranks[..., 0].contiguous(), ranks[..., 1:].contiguous()
