"""The static tree that accepts the most: from measured acceptance by depth and rank (Sequoia, arXiv 2402.12374)."""

import heapq
from collections.abc import Sequence
from math import prod

from specdec.trees.block import most_nodes
from specdec.trees.static import Chain, RankPath, StaticTree

TEMPERATURES = (0.0, 1.0)  # the temperatures of a drafter's acceptance.json

# accept[d-1][r]: probability that the child of rank r at depth d is the target's token
Table = Sequence[Sequence[float]]


def expected_tau(paths: Sequence[Sequence[int]], accept: Table) -> float:
    """Tokens that a round emits: one, and one for each node that is reached."""
    return 1 + sum(prod(accept[depth][rank] for depth, rank in enumerate(path)) for path in paths)


def optimal_paths(accept: Table, num_draft_tokens: int) -> list[RankPath]:
    """The tree of `num_draft_tokens` nodes, root included, with the greatest expected number of emitted tokens.

    The table's size bounds it: no deeper than the rows, no more children than the columns.
    A node is reached with the product of its path's probabilities, and the expectation is the sum over nodes. No child
    is reached more often than its parent, so the most often reached nodes form a tree, and no tree has a greater sum.
    """
    most = most_nodes(len(accept[0]), len(accept))
    if not 2 <= num_draft_tokens <= most:
        raise ValueError(
            f"num_draft_tokens is {num_draft_tokens}, but a tree of {len(accept)} levels and {len(accept[0])} children "
            f"has 2 to {most} nodes, the root counted"
        )
    chosen: list[RankPath] = []
    frontier: list[tuple[float, int, RankPath]] = [(-1.0, 0, ())]
    while len(chosen) < num_draft_tokens:
        share, depth, path = heapq.heappop(frontier)
        chosen.append(path)
        if depth < len(accept):
            for rank, probability in enumerate(accept[depth]):
                heapq.heappush(frontier, (share * probability, depth + 1, (*path, rank)))
    return chosen[1:]


def tree_of(paths: Sequence[RankPath]) -> Chain | StaticTree:
    """Return the static tree of these paths; a chain, if it is one."""
    tree = StaticTree(paths)
    return Chain(tree.steps) if tree.topk == 1 else tree
