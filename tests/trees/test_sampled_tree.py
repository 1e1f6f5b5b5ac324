"""The tree of draws: its shape, what it says its children were drawn from, and that they were."""

import pytest
import torch
from helpers import tiny_drafter, tiny_target
from test_trees import check_invariants

from specdec.children import Drawn, children_of
from specdec.drafters.vocab import DraftVocab
from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import Noise, hashes_of
from specdec.structs import Sampling
from specdec.trees import SampledTree

EXPANSIONS = [(3, 2, 1), (1, 1, 1), (2,), (1, 3), (2, 1, 3)]


def start(drafter, target, b=2):
    """The drafter's state after six positions, the same in every row."""
    g = torch.Generator().manual_seed(4)
    drafter.reset(b, 64)
    feats = torch.randn(1, 6, len(drafter.taps) * target.config.hidden, generator=g).expand(b, -1, -1)
    tokens = torch.randint(17, (1, 6), generator=g).expand(b, -1)
    return drafter.admit(0, torch.zeros(b, dtype=torch.int64), feats, tokens, torch.full((b,), 6))


def grow(policy, drafter, target, sampling, b=2):
    root = torch.full((b,), 3)
    noise = Noise([(0, row) for row in range(b)], hashes_of(torch.arange(17))).behind(root, policy.steps + 1)
    return policy.grow(drafter, root, start(drafter, target, b), children_of("drawn", sampling, noise))


@pytest.mark.matrix
@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, top_k=3)], ids=["warm", "filtered"])
@pytest.mark.parametrize("expansion", EXPANSIONS, ids=str)
@torch.inference_mode()
def test_q_is_what_the_drafter_says_after_each_path(expansion, sampling):
    """Each node's path drafted alone, as a chain: the same distribution, in the target's vocabulary. A verifier would
    not notice if the tree mixed paths up: it would only accept less."""
    target, policy = tiny_target(), SampledTree(expansion)
    drafter = tiny_drafter(target, draft_vocab=8)
    tree = grow(policy, drafter, target, sampling)
    check_invariants(tree, policy.num_draft_tokens)
    children = tree.parents[0, 1:].bincount(minlength=policy.num_draft_tokens)
    assert children.tolist() == [(*expansion, 0)[level] for level in tree.depth[0]]
    for node in range(tree.tokens.shape[1]):
        if tree.depth[0, node] == tree.steps:
            assert tree.q[0, node].sum() == 0, "a leaf has no children"
            continue
        state = start(drafter, target)
        path = tree.ancestors[0, node].nonzero().flatten()[1:]
        for level, ancestor in enumerate(path, 1):
            alone = torch.ones(2, 1, level, dtype=torch.bool)
            state = drafter.step(tree.tokens[:, ancestor : ancestor + 1], state.hidden, level, alone)
        expected = torch.zeros(2, 17).index_copy_(1, drafter.vocab.ids, filtered_probs(state.logits[:, 0], sampling))
        torch.testing.assert_close(tree.q[0, node], expected[0], rtol=1e-4, atol=1e-6)


def test_children_are_drawn_from_q_without_replacement_in_order():
    rows, logits = 100_000, torch.randn(5, generator=torch.Generator().manual_seed(2))
    noise = Noise([(3, row) for row in range(rows)], hashes_of(torch.arange(5))).behind(torch.zeros(rows).long())
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
    tree = grow(SampledTree((4,)), drafter, target, Sampling(1.0, top_k=2), b=50)
    best = start(drafter, target).logits[0, 0].topk(4).indices
    assert (tree.q[0, 0] > 0).sum() == 2
    assert {frozenset(pair) for pair in tree.tokens[:, 1:3].tolist()} == {frozenset(best[:2].tolist())}
    assert len(tree.tokens[:, 1].unique()) == 2
    assert (tree.tokens[:, 3:] == best[2:]).all()


@pytest.mark.parametrize("expansion", [(), (2, 0), (-1,)], ids=str)
def test_nonsense_is_refused(expansion):
    with pytest.raises(ValueError, match="at least one child"):
        SampledTree(expansion)
