"""The tree of the best candidates of a dynamic tree, in one launch.

Of M candidates in breadth-first order, parents before children, it selects the N - 1 with the largest scores, the first
ones among equal scores. With the root as node 0 they are the nodes of the tree, in the same order.

    depth[i] = depth[parents[i]] + 1        ancestors[i,j] = (j == i) or ancestors[parents[i],j]

In torch: `specdec.trees.dynamic.best_tree`. A row of the batch is one program. It finds the (N-1)th largest score by
bisection over the order of floats. A running count of the selected ones numbers the nodes. Then it walks up from all
nodes at once, as many steps as the tree is deep.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.cuda.tree_level import ordered

MOST, NODES = 4096, 256  # candidates of a row, nodes of a tree
COLUMNS = 32  # of the ancestors, at once

Tree = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _threshold(rank, real, count):
    """The count-th largest of the ranks that are `real`."""
    rank = rank.to(tl.int64)
    least = tl.min(tl.where(real, rank, 2147483647), 0)
    most = tl.max(tl.where(real, rank, -2147483648), 0)
    while least < most:
        middle = (least + most + 1) >> 1
        enough = tl.sum((real & (rank >= middle)).to(tl.int32), 0) >= count
        least = tl.where(enough, middle, least)
        most = tl.where(enough, most, middle - 1)
    return least


@triton.jit
def _tree_select(
    root, tokens, scores, parents, number, out_tokens, out_parents, depth, ancestors, logq, candidates, n, steps,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    real = place < candidates
    at = row * candidates + place
    score = tl.load(scores + at, mask=real, other=0.0)
    rank = ordered(score)
    least = _threshold(rank, real, n - 1)
    above, equal = real & (rank > least), real & (rank == least)
    wanted = n - 1 - tl.sum(above.to(tl.int32), 0)
    selected = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= wanted))
    node = tl.cumsum(selected.to(tl.int32), 0)
    tl.store(number + row * (candidates + 1) + 1 + place, node, mask=selected)
    out = row * n + node
    tl.store(out_tokens + out, tl.load(tokens + at, mask=selected, other=0), mask=selected)
    tl.store(logq + out, score, mask=selected)
    tl.store(out_tokens + row * n, tl.load(root + row))
    tl.store(out_parents + row * n, tl.zeros([], tl.int64))
    tl.store(logq + row * n, 0.0)
    tl.debug_barrier()  # from here on threads read what others wrote
    parent = tl.load(parents + at, mask=selected, other=0)
    inner = selected & (parent > 0)
    parent = tl.load(number + row * (candidates + 1) + parent, mask=inner, other=0)
    tl.store(out_parents + out, parent.to(tl.int64), mask=selected)
    tl.debug_barrier()
    i = tl.arange(0, ROWS)
    for first in range(0, n, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        current = i
        deep = tl.zeros([ROWS], tl.int64)
        seen = (current[:, None] == column[None, :]).to(tl.int32)
        for _ in range(steps):
            deep += (current > 0).to(tl.int64)
            current = tl.load(out_parents + row * n + current, mask=i < n, other=0).to(tl.int32)
            seen = seen | (current[:, None] == column[None, :]).to(tl.int32)
        tl.store(depth + row * n + i, deep, mask=i < n)
        spot = ancestors + (row * n + i)[:, None] * n + column[None, :]
        tl.store(spot, seen.to(tl.uint8), mask=(i < n)[:, None] & (column < n)[None, :])


def launch(root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int, steps: int) -> Tree:
    """Select the best `nodes` - 1 of M candidates below the root.

    root [B]; of the candidates tokens [B,M], scores [B,M] fp32 and parents [B,M]: 1 + the place of the parent, or 0 for
    the root. No candidate is deeper than `steps`, and none scores above its parent.

    Returns tokens, parents and depth [B,N] int64, ancestors [B,N,N] bool and scores [B,N], the root's 0.
    """
    b, candidates = scores.shape
    assert candidates <= MOST
    assert 2 <= nodes <= min(NODES, candidates + 1)
    new_tokens, new_parents, depth = (tokens.new_empty(b, nodes, dtype=torch.int64) for _ in range(3))
    ancestors = torch.empty(b, nodes, nodes, dtype=torch.bool, device=scores.device)
    logq = scores.new_empty(b, nodes)
    number = torch.empty(b, candidates + 1, dtype=torch.int32, device=scores.device)
    root, tokens, scores, parents = (x.contiguous() for x in (root, tokens, scores, parents))
    _tree_select[(b,)](
        root, tokens, scores, parents, number, new_tokens, new_parents, depth, ancestors.view(torch.uint8), logq,
        candidates, nodes, steps,
        BLOCK=triton.next_power_of_2(candidates), ROWS=triton.next_power_of_2(nodes), COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return new_tokens, new_parents, depth, ancestors, logq
