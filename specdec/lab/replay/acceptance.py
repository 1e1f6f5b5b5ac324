"""What a tree accepts at known places of a text, as functions of tensors.

Shapes: R roots, D recorded steps, W topk, M candidates of a pool.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specdec.trees import BlockTree, DynamicTree
from specdec.trees.dynamic import Pool, best_first
from specdec.trees.static import FixedTree

NOWHERE = torch.iinfo(torch.int32).max  # the rank of a token or node that no tree holds

# A truncation rule. It takes the path log-probabilities of all candidates level by level, [R,W], [R,W^2], ..., and
# returns how many levels are drafted, [R], at least 1, and how many nodes are verified at most, [R], the root counted.
Rule = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]


@dataclass
class Acceptance:
    """What one tree does at every root: tensors [R]."""

    accepted: Tensor  # drafted tokens that the text runs through
    expected: Tensor | None  # tokens that a round is expected to emit given the text before it; None: not known
    nodes: Tensor  # that are verified, the root counted
    levels: Tensor  # that are drafted


def filled(like: Tensor, value: int) -> Tensor:
    """The value for each row of `like`."""
    return torch.full((len(like),), value)


def dynamic_levels(topk: int, steps: int) -> list[slice]:
    """Where the levels of a dynamic tree's pool lie."""
    ends = [0, *(DynamicTree.candidates(topk, depth) for depth in range(1, steps + 1))]
    return [slice(*ends_of) for ends_of in pairwise(ends)]


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


def pool_ranks(pool: Pool, topk: int, steps: int, places: Tensor) -> Tensor:
    """Ranks [R,n] of the candidates at places [R,n] among all of the first `steps` levels; NOWHERE for other places."""
    count = DynamicTree.candidates(topk, steps)
    order = best_first(pool.scores[:, :count])
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(count).expand_as(order))
    there = (places >= 0) & (places < count)
    return torch.where(there, rank.gather(1, torch.where(there, places, 0).long()), NOWHERE).int()


def static_accepts(tree: FixedTree, ranks: Tensor) -> Tensor:
    """How deep the text runs through the tree at each root, [R]. ranks [R,D]: of the text's tokens."""
    parents, rank = tree.parents[1:], torch.cat([level.nodes for level in tree.levels]) % tree.topk
    child = torch.zeros(tree.num_draft_tokens, tree.topk + 1, dtype=torch.int64)  # node and rank -> node, or 0
    child[parents, rank] = torch.arange(1, tree.num_draft_tokens)
    node, accepted = torch.zeros(len(ranks), dtype=torch.int64), torch.zeros(len(ranks), dtype=torch.int64)
    for depth in range(tree.steps):
        below = child[node, ranks[:, depth].clamp(max=tree.topk).long()]
        node = torch.where(accepted == depth, below, 0)
        accepted += node > 0
    return accepted


def block_accepts(tree: BlockTree, gains: Tensor, tokens: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """What of a text is in the trees over blocks: gains and tokens [R,D,topk] of the slots, following [R,>=D] the text.

    Returns which nodes are [R,D], by depth, and how many children each node has that the text runs through, [R,D]: of
    the root first. The children of a node are the best tokens of the slot."""
    pool, n = tree.best_paths(gains, tokens), tree.num_draft_tokens
    kept = torch.zeros_like(pool.tokens, dtype=torch.bool).scatter_(1, best_first(pool.scores)[:, : n - 1], True)
    levels = [slice(start, start + size) for start, size in zip(tree.starts, tree.sizes, strict=True)]
    _, hit, counts = follow(pool, levels, following, kept)
    return hit >= 0, counts


def likely(probability: float) -> Rule:
    """The rule that verifies no node whose path has less than this probability under the drafter."""
    least = _log(probability)

    def rule(levels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        nodes = 1 + sum((scores >= least).sum(1) for scores in levels)
        return filled(nodes, len(levels)), nodes

    return rule


def while_likely(probability: float) -> Rule:
    """The rule that drafts no level behind one whose best path has less than this probability under the drafter."""
    least = _log(probability)

    def rule(levels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        goes_on = [scores.amax(1, keepdim=True) >= least for scores in levels[:-1]]
        deep = 1 + torch.cat([levels[0][:, :0].bool(), *goes_on], 1).long().cumprod(1).sum(1)
        return deep, filled(deep, NOWHERE)

    return rule


def _log(probability: float) -> float:
    if not 0 < probability <= 1:
        raise ValueError(f"a truncation rule's probability must lie in (0, 1], got {probability}")
    return math.log(probability)
