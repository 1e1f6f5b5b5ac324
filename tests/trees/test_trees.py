"""Trees: invariants, ties, the drawing, children that are drawn from the drafter, and the best-first tree over a
block, against its authors' code and against a heap."""

import heapq
from pathlib import Path

import pytest
import torch
from golden_blocks import absorb
from helpers import tiny_drafter, tiny_target
from safetensors.torch import load_file

from specdec.children import Drawn, children_of
from specdec.cli.screen import draw
from specdec.drafters.vocab import DraftVocab
from specdec.lab.proof.laws import TableDrafter
from specdec.ops.likely import BLOCK, MANY, top
from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import Noise, hashes_of
from specdec.structs import DraftTree, Sampling
from specdec.trees import BlockTree, Chain, DynamicTree, SampledTree, StaticTree
from specdec.trees.dynamic import select


class CheckedDrafter(TableDrafter):
    """Checks the ancestors that a tree policy passes."""

    def step(self, tokens, hidden, level, ancestors):
        assert ancestors.shape == (*tokens.shape, level * tokens.shape[1])
        assert ancestors[:, :, -tokens.shape[1] :].diagonal(dim1=1, dim2=2).all()
        return super().step(tokens, hidden, level, ancestors)


def start(drafter, target, b=3):
    """A state after a few committed tokens, always the same, in rows of different lengths; and the roots."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.config.vocab, (b, 6), generator=g)
    feats = torch.randn(b, 6, len(drafter.taps) * target.config.hidden, generator=g)
    n = torch.tensor([6, 2, 4])[:b]
    state = absorb(drafter, feats if drafter.taps else None, tokens, lens=n)
    return tokens.gather(1, n[:, None] - 1).squeeze(1), state


def grow(policy, logits):
    """Two trees of tokens 2, 3, 5 and 6, whose logits are the same at every node, so that scores are known by hand."""
    ids, table, root = torch.tensor([2, 3, 5, 6]), torch.zeros(8, 8), torch.tensor([7, 7])
    table[:, ids] = torch.tensor(logits)
    drafter = CheckedDrafter(table, ids)
    return policy.grow(drafter, root, drafter.state(root[:, None]))


def check_invariants(tree: DraftTree, n: int):
    b = len(tree.tokens)
    assert tree.tokens.shape == tree.parents.shape == tree.depth.shape == (b, n)
    nodes = torch.arange(n)
    assert (tree.parents[:, 1:] < nodes[1:]).all()
    assert (tree.depth[:, 0] == 0).all()
    assert torch.equal(tree.depth[:, 1:], tree.depth.gather(1, tree.parents)[:, 1:] + 1)
    assert (tree.depth.diff(dim=1) >= 0).all(), "breadth first"
    for row in range(b):
        for node in range(n):
            path, at = {node}, node
            while at:
                at = tree.parents[row, at].item()
                path.add(at)
            assert set(tree.ancestors[row, node].nonzero().flatten().tolist()) == path
        children = {}
        for node in range(1, n):
            children.setdefault(tree.parents[row, node].item(), []).append(tree.tokens[row, node].item())
        assert all(len(set(tokens)) == len(tokens) for tokens in children.values()), "siblings are distinct"
    assert (tree.logq.gather(1, tree.parents) >= tree.logq).all()


def test_scores_and_the_drawing_by_hand():
    """P = .6 .3 .1: the best four paths are a (.6), aa (.36), b (.3), and aaa (.216)."""
    tree = grow(DynamicTree(topk=2, steps=3, num_draft_tokens=5), torch.tensor([0.6, 0.3, 0.1, 1e-9]).log().tolist())
    assert tree.tokens[0].tolist() == [7, 2, 3, 2, 2]
    assert tree.parents[0].tolist() == [0, 0, 0, 1, 3]
    assert tree.depth[0].tolist() == [0, 1, 1, 2, 3]
    torch.testing.assert_close(tree.logq[0].exp(), torch.tensor([1.0, 0.6, 0.3, 0.36, 0.216]))
    check_invariants(tree, 5)
    assert draw(tree, [0, 1, 3], {7: "root", 2: "a", 3: "b"}.get) == (
        "'root' *\n|-- 'a'  0.60 *\n|   `-- 'a'  0.36 *\n|       `-- 'a'  0.22\n`-- 'b'  0.30"
    )


@pytest.mark.matrix
@pytest.mark.parametrize("logits", [[0.0, 0.0, 0.0, 0.0], [200.0, 0.0, 0.0, 0.0], [200.0, 200.0, -200.0, -200.0]])
@pytest.mark.parametrize("n", [2, 5, 9, 13])
def test_ties_never_orphan_a_node(logits, n):
    """With log-probability 0 a child scores as its parent; EAGLE's own selection attaches it to a wrong parent then."""
    check_invariants(grow(DynamicTree(topk=3, steps=3, num_draft_tokens=n), logits), n)


@pytest.mark.parametrize(
    "policy", [DynamicTree(1, 4, 5), StaticTree([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]), SampledTree((1, 1, 1, 1))]
)
@torch.inference_mode()
def test_a_tree_of_first_children_is_the_chain(policy):
    target = tiny_target()
    drafter = tiny_drafter(target)
    assert policy.draft_slots() == Chain(4).draft_slots()
    chain, tree = (each.grow(drafter, *start(drafter, target)) for each in (Chain(4), policy))
    for field in ("tokens", "parents", "depth", "ancestors"):
        assert torch.equal(getattr(tree, field), getattr(chain, field)), field
    torch.testing.assert_close(tree.logq, chain.logq)


@pytest.mark.matrix
@pytest.mark.parametrize("size", [MANY - BLOCK, MANY, MANY + 1, 4 * MANY])
@pytest.mark.parametrize("k", [1, 4, MANY // BLOCK + 1])
def test_the_largest_of_many_by_blocks(size, k):
    torch.manual_seed(size + k)
    scores = torch.randn(2, 3, size)
    scores[0, 0, 130 : 130 + 2 * k] += 10  # all within few blocks
    scores[0, 1] = scores[0, 1].bfloat16().float()  # many are equal
    scores[0, 2, 5:] = -torch.inf  # fewer than k that can be
    best, places = top(scores, k)
    assert torch.equal(best, scores.topk(k).values)
    assert torch.equal(scores.gather(-1, places), best)
    assert all(len(set(row)) == k for row in places.flatten(0, 1).tolist())


# Children that are drawn

EXPANSIONS = [(3, 2, 1), (1, 1, 1), (2,), (1, 3), (2, 1, 3)]


def same_start(drafter, target, b=2):
    """The drafter's state after six positions, the same in every row."""
    g = torch.Generator().manual_seed(4)
    feats = torch.randn(1, 6, len(drafter.taps) * target.config.hidden, generator=g).expand(b, -1, -1)
    return absorb(drafter, feats, torch.randint(17, (1, 6), generator=g).expand(b, -1))


def grow_drawn(policy, drafter, target, sampling, b=2):
    root = torch.full((b,), 3)
    noise = Noise([(0, row) for row in range(b)], hashes_of(torch.arange(17))).after(root, policy.steps + 1)
    return policy.grow(drafter, root, same_start(drafter, target, b), children_of("drawn", sampling, noise))


@pytest.mark.matrix
@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, top_k=3)], ids=["warm", "filtered"])
@pytest.mark.parametrize("expansion", EXPANSIONS, ids=str)
@torch.inference_mode()
def test_q_is_what_the_drafter_says_after_each_path(expansion, sampling):
    """Each node's path drafted alone, as a chain: the same distribution, in the target's vocabulary. A verifier would
    not notice if the tree mixed paths up: it would only accept less."""
    target, policy = tiny_target(), SampledTree(expansion)
    drafter = tiny_drafter(target, draft_vocab=8)
    tree = grow_drawn(policy, drafter, target, sampling)
    check_invariants(tree, policy.num_draft_tokens)
    children = tree.parents[0, 1:].bincount(minlength=policy.num_draft_tokens)
    assert children.tolist() == [(*expansion, 0)[level] for level in tree.depth[0]]
    for node in range(tree.tokens.shape[1]):
        if tree.depth[0, node] == tree.steps:
            assert tree.q[0, node].sum() == 0, "a leaf has no children"
            continue
        state = same_start(drafter, target)
        path = tree.ancestors[0, node].nonzero().flatten()[1:]
        for level, ancestor in enumerate(path, 1):
            alone = torch.ones(2, 1, level, dtype=torch.bool)
            state = drafter.step(tree.tokens[:, ancestor : ancestor + 1], state.hidden, level, alone)
        expected = torch.zeros(2, 17).index_copy_(1, drafter.vocab.ids, filtered_probs(state.logits[:, 0], sampling))
        torch.testing.assert_close(tree.q[0, node], expected[0], rtol=1e-4, atol=1e-6)


def test_children_are_drawn_from_q_without_replacement_in_order():
    rows, logits = 100_000, torch.randn(5, generator=torch.Generator().manual_seed(2))
    noise = Noise([(3, row) for row in range(rows)], hashes_of(torch.arange(5))).after(torch.zeros(rows).long())
    q, pairs = (x[:, 0] for x in Drawn(noise, Sampling(1.0)).draw(logits.expand(rows, 1, 5), DraftVocab(5), 0, 2))
    seen = (pairs[:, 0] * 5 + pairs[:, 1]).bincount(minlength=25).view(5, 5)
    expected = q[0, :, None] * q[0] / (1 - q[0, :, None])
    expected.fill_diagonal_(0)
    # Five standard deviations of a share estimated from 100,000 draws are at most 5 * sqrt(.25 / 100000) = .0079
    torch.testing.assert_close(seen / rows, expected, rtol=0, atol=0.0079)


@torch.inference_mode()
def test_used_up_filters_leave_the_likeliest_tokens():
    """top-k 2 and four children: the first two are drawn, the others are the drafter's third and fourth choice."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    tree = grow_drawn(SampledTree((4,)), drafter, target, Sampling(1.0, top_k=2), b=50)
    best = same_start(drafter, target).logits[0, 0].topk(4).indices
    assert (tree.q[0, 0] > 0).sum() == 2
    assert {frozenset(pair) for pair in tree.tokens[:, 1:3].tolist()} == {frozenset(best[:2].tolist())}
    assert len(tree.tokens[:, 1].unique()) == 2
    assert (tree.tokens[:, 3:] == best[2:]).all()


# The best tree over a block

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
        expected = by_heap(logp[row].gather(1, order).tolist(), topk, nodes - 1)
        ours = paths_of(tree.parents[row].tolist(), tree.tokens[row].tolist())
        ranks = [tuple(order[d].tolist().index(token) for d, token in enumerate(path)) for path in ours]
        assert set(ranks) == expected
        scores = [sum(logp[row, d, token] for d, token in enumerate(path)) for path in ours]
        torch.testing.assert_close(tree.logq[row, 1:], torch.stack(scores))
