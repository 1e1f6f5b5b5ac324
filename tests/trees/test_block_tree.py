"""The best-first tree over a block: against its authors' code, and against a heap."""

import heapq
from pathlib import Path

import pytest
import torch
from helpers import DRAFTERS, tiny_target
from safetensors.torch import load_file
from test_trees import check_invariants, start

from specdec.structs import DraftTree
from specdec.trees import BlockTree, DynamicTree
from specdec.trees.dynamic import select

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "blocks" / "ddtree.safetensors")


def paths_of(parents: list[int], tokens: list[int]) -> list[tuple[int, ...]]:
    """The path of every node but the root."""
    out: list[tuple[int, ...]] = [()]
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        out.append((*out[parent], token))
    return out[1:]


def over(policy: BlockTree, logp: torch.Tensor) -> DraftTree:
    """The trees over marginals logp [B,D,V], whose tokens are their places."""
    values, tokens = logp.sort(dim=-1, descending=True, stable=True)
    pool = policy.best_paths(values[..., : policy.topk], tokens[..., : policy.topk])
    return select(torch.zeros(len(logp), dtype=torch.int64), pool, policy.num_draft_tokens, policy.steps)


@pytest.mark.parametrize("case", ["flat", "mixed", "same_marginals", "sharp"])
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_the_trees_of_ddtree(case, budget):
    """Node by node, equal scores included: theirs come by score, ours breadth first."""
    parents, tokens = (GOLDEN[f"{case}.b{budget}.{name}"].tolist() for name in ("parents", "node_token_ids"))
    golden = paths_of(parents, [0, *tokens])
    tree = over(BlockTree(budget, 5, budget + 1), GOLDEN[f"{case}.log_probs"][None])
    check_invariants(tree, budget + 1)
    assert paths_of(tree.parents[0].tolist(), tree.tokens[0].tolist()) == sorted(golden, key=len)


def by_heap(logp: list[list[float]], topk: int, nodes: int) -> set[tuple[int, ...]]:
    """The best paths of ranks below topk, one after the other. logp: of each level, in order of rank."""
    heap, found = [(-logp[0][0], (0,))], set()
    while heap and len(found) < nodes:
        score, path = heapq.heappop(heap)
        found.add(path)
        level, rank = len(path) - 1, path[-1]
        if rank + 1 < topk:
            heapq.heappush(heap, (score + logp[level][rank] - logp[level][rank + 1], (*path[:-1], rank + 1)))
        if level + 1 < len(logp):
            heapq.heappush(heap, (score - logp[level + 1][0], (*path, 0)))
    return found


@pytest.mark.parametrize(
    ("topk", "steps", "nodes"), [(8, 7, 32), (2, 4, 20), (3, 1, 4), (1, 6, 7), (5, 15, 64), (4, 2, 21)]
)
def test_a_heap_finds_the_same(topk, steps, nodes):
    """Rows of flat and of sharp marginals in one batch, few children, few levels, and the whole tree."""
    scale = torch.tensor([0.3, 1.0, 4.0, 12.0])[:, None, None]
    logits = torch.randn(4, steps, 20, generator=torch.Generator().manual_seed(nodes), dtype=torch.float64)
    logp = (logits * scale).log_softmax(-1)
    tree = over(BlockTree(topk, steps, nodes), logp)
    check_invariants(tree, nodes)
    for row, order in enumerate(logp.argsort(dim=-1, descending=True)):
        sorted_logp = logp[row].gather(1, order)
        expected = by_heap(sorted_logp.tolist(), topk, nodes - 1)
        ours = paths_of(tree.parents[row].tolist(), tree.tokens[row].tolist())
        ranks = [tuple(order[d].tolist().index(token) for d, token in enumerate(path)) for path in ours]
        assert set(ranks) == expected
        scores = [sum(logp[row, d, token] for d, token in enumerate(path)) for path in ours]
        torch.testing.assert_close(tree.logq[row, 1:], torch.stack(scores))


@torch.inference_mode()
def test_it_holds_the_best_of_a_dynamic_tree():
    """Over the same block the dynamic tree with as many children keeps no likelier paths."""
    target = tiny_target()
    sums = []
    for policy in (BlockTree(6, 5, 12), DynamicTree(6, 5, 12)):
        drafter = DRAFTERS["dflash"](target)
        sums.append(policy.grow(drafter, *start(drafter, target)).logq.exp().sum(1))
    assert (sums[0] >= sums[1] - 1e-6).all()


@pytest.mark.parametrize(
    ("sizes", "message"), [((2, 2, 9), "holds 2 to 7"), ((0, 2, 3), "at least 1"), ((2, 2, 1), "holds 2")]
)
def test_what_is_no_tree(sizes, message):
    with pytest.raises(ValueError, match=message):
        BlockTree(*sizes)
