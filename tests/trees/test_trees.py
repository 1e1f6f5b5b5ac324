"""Tree invariants, ties, and the drawing."""

import pytest
import torch
from helpers import tiny_drafter, tiny_target

from specdec.cli.drawing import draw
from specdec.contracts import Drafter, DraftState
from specdec.sampling.likely import BLOCK, MANY, top
from specdec.structs import DraftTree
from specdec.trees import Chain, DynamicTree, SampledTree, StaticTree
from specdec.trees.ancestors import ancestors_of


class ScriptedDrafter(Drafter):
    """Gives the same logits at every node, so that scores are known by hand."""

    class vocab:
        size = 4

        @staticmethod
        def to_target(ids):
            return ids + 100

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def state(self, b, w):
        return DraftState(torch.zeros(b, w, 1), self.logits.expand(b, w, -1))

    def step(self, tokens, hidden, level, ancestors):
        assert ancestors.shape == (*tokens.shape, level * tokens.shape[1])
        return self.state(*tokens.shape)


def start(drafter, target, b=3):
    """A state after a few committed tokens, always the same, in rows of different lengths; and the roots."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.config.vocab, (b, 6), generator=g)
    feats = torch.randn(b, 6, len(drafter.taps) * target.config.hidden, generator=g)
    n = torch.tensor([6, 2, 4])[:b]
    drafter.reset(b, 64)
    state = drafter.admit(0, torch.zeros(b, dtype=torch.int64), feats if drafter.taps else None, tokens, n)
    return tokens.gather(1, n[:, None] - 1).squeeze(1), state


def grow(policy, logits, b=2):
    drafter = ScriptedDrafter(logits)
    return policy.grow(drafter, torch.full((b,), 7), drafter.state(b, 1))


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
    assert tree.tokens[0].tolist() == [7, 100, 101, 100, 100]
    assert tree.parents[0].tolist() == [0, 0, 0, 1, 3]
    assert tree.depth[0].tolist() == [0, 1, 1, 2, 3]
    torch.testing.assert_close(tree.logq[0].exp(), torch.tensor([1.0, 0.6, 0.3, 0.36, 0.216]))
    check_invariants(tree, 5)
    assert draw(tree, [0, 1, 3], {7: "root", 100: "a", 101: "b"}.get) == (
        "'root' *\n|-- 'a'  0.60 *\n|   `-- 'a'  0.36 *\n|       `-- 'a'  0.22\n`-- 'b'  0.30"
    )


@pytest.mark.matrix
@pytest.mark.parametrize("logits", [[0.0, 0.0, 0.0, 0.0], [200.0, 0.0, 0.0, 0.0], [200.0, 200.0, -200.0, -200.0]])
@pytest.mark.parametrize("n", [2, 5, 9, 13])
def test_ties_never_orphan_a_node(logits, n):
    """With log-probability 0 a child scores as its parent; EAGLE's own selection attaches it to a wrong parent then."""
    check_invariants(grow(DynamicTree(topk=3, steps=3, num_draft_tokens=n), logits), n)


@pytest.mark.parametrize(
    "policy", [DynamicTree(2, 2, 7), DynamicTree(3, 4, 20), DynamicTree(1, 4, 5), DynamicTree(4, 1, 5), Chain(3)]
)
@torch.inference_mode()
def test_invariants_with_a_real_drafter(policy):
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab=8)
    check_invariants(policy.grow(drafter, *start(drafter, target)), policy.num_draft_tokens)


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


def test_ancestors_of_deep_paths():
    parents = torch.tensor([[0, 0, 1, 2, 3, 4, 5]])
    assert torch.equal(ancestors_of(parents, 6)[0], torch.ones(7, 7).tril().bool())
