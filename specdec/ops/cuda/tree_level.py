"""One level of a dynamic tree: the scores of all children of W nodes, and the best of them, in one launch.

    score[c] = path[c // K] + gain[c]                   candidate c = w K + k is child k of node w
    parent[c] = place[c // K]
    best = the candidates of the W largest scores, best first, of equal ones the first
    of each best one: its score, its token, its parent w, its place first + c, and what it sees: what w sees, and itself

In torch: `specdec.trees.dynamic.next_level`. A row of the batch is one program.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 1024  # candidates of a row


class Level(NamedTuple):
    """The candidates of a level, W K of them, and the best W."""

    all_scores: Tensor  # [B,W*K] fp32
    all_parents: Tensor  # [B,W*K] places of their parents
    scores: Tensor  # [B,W] of the best
    tokens: Tensor  # [B,W]
    parents: Tensor  # [B,W] which of the W nodes
    places: Tensor  # [B,W]
    ancestors: Tensor  # [B,W,C+W] bool


@triton.jit
def ordered(x):
    """An int32 for an fp32, in the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# These change from level to level, and another kernel for each would gain nothing.
@triton.jit(do_not_specialize=["first", "columns", "seen_row", "seen_node"])
def _tree_level(
    scores, places, ancestors, gains, tokens, all_scores, all_parents, best_scores, best_tokens, best_parents,
    best_places, seen, first, columns, seen_row, seen_node,
    W: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    real = candidate < W * K
    node = row * W + candidate // K
    score = tl.load(scores + node, mask=real, other=0.0) + tl.load(
        gains + row * W * K + candidate, mask=real, other=0.0
    )
    tl.store(all_scores + row * W * K + candidate, score, mask=real)
    tl.store(all_parents + row * W * K + candidate, tl.load(places + node, mask=real, other=0), mask=real)
    rank = tl.where(real, ordered(score), -2147483648)  # below every number's
    for i in range(COUNT):
        _, best = tl.max(rank, 0, return_indices=True)
        chosen, out = candidate == best, row * COUNT + i
        parent = best // K
        tl.store(best_scores + out, tl.sum(tl.where(chosen, score, 0.0), 0))
        tl.store(best_tokens + out, tl.load(tokens + row * W * K + best))
        tl.store(best_parents + out, parent.to(tl.int64))
        tl.store(best_places + out, (first + best).to(tl.int64))
        inherited = ancestors + row * seen_row + parent * seen_node
        for start in range(0, columns + COUNT, WIDTH):
            column = start + tl.arange(0, WIDTH)
            sees = tl.load(inherited + column, mask=column < columns, other=0).to(tl.int32)
            sees = tl.where(column == columns + i, 1, sees)
            tl.store(seen + out * (columns + COUNT) + column, sees.to(tl.uint8), mask=column < columns + COUNT)
        rank = tl.where(chosen, -2147483648, rank)


def launch(
    scores: Tensor, places: Tensor, ancestors: Tensor, gains: Tensor, tokens: Tensor, first: int, count: int
) -> Level:
    """Choose the best children of one level of a dynamic tree.

    Of W nodes: scores [B,W] fp32, places [B,W] int64, and ancestors [B,W,C] bool, which of C positions each sees. Of
    their children: gains [B,W,K] fp32 and tokens [B,W,K] int64. first: the place of the first child. count: how many of
    the children are chosen, W or, on a last level, 0.
    """
    b, w, k = gains.shape
    columns = ancestors.shape[2]
    assert w * k <= MOST
    assert ancestors.stride(2) == 1
    scores, places, gains, tokens = (x.contiguous() for x in (scores, places, gains, tokens))
    new, ids = gains.new_empty, tokens.new_empty
    made = Level(
        new(b, w * k), ids(b, w * k), new(b, count), ids(b, count), ids(b, count), ids(b, count),
        ancestors.new_empty(b, count, columns + count),
    )  # fmt: skip
    block = triton.next_power_of_2(w * k)
    _tree_level[(b,)](
        scores, places, ancestors.view(torch.uint8), gains, tokens, *made[:-1], made.ancestors.view(torch.uint8),
        first, columns, *ancestors.stride()[:2],
        W=w, K=k, COUNT=count, BLOCK=block, WIDTH=64, num_warps=max(1, min(4, block // 128)),
    )  # fmt: skip
    return made
