"""Every rule against its law. Target and drafter are tables: p and q depend on the token before, so the law of several
tokens is known exactly."""

import itertools

import pytest
import torch
from helpers import Credulous, pvalue_of_counts
from test_trees import CheckedDrafter
from test_verify import random_tree

from specdec.children import Drawn, children_of
from specdec.sampling.filters import draw, filtered_probs
from specdec.sampling.noise import Noise, hashes_of
from specdec.structs import DraftTree, Sampling
from specdec.trees import SampledTree
from specdec.trees.base import ancestors_of
from specdec.verify import (
    VERIFIERS,
    BlockVerification,
    MultiRoundRejection,
    SampleAndMatch,
    TwoThresholds,
    TypicalAcceptance,
    make_verifier,
    sample_and_match,
)

V, ROWS = 6, 40_000
G = torch.Generator().manual_seed(11)
TARGET = torch.randn(V, V, generator=G) * 0.9  # logits of the token after the row's
DRAFTER = TARGET + torch.randn(V, V, generator=G) * 0.8
WARM = Sampling(1.0)
FILTERED = Sampling(0.8, top_k=5, top_p=0.9)


def verify(verifier, tree: DraftTree, sampling: Sampling, noise):
    return verifier(tree, TARGET[tree.tokens], sampling, noise)


def noise_of(rows: int, steps: int, seed: int = 0):
    """Return the noise of the positions after token 0, and of three positions after these."""
    noise, root = Noise([(seed, row) for row in range(rows)], hashes_of(torch.arange(V))), torch.zeros(rows).long()
    return noise.after(root, steps + 1), noise.after(root + steps + 1, 3)


def three_tokens(verifier, expansion, sampling, ids=None, rows=ROWS, seed=0, kind="drawn"):
    """Return the first three tokens after token 0 [rows,3], drawn from the target where fewer were emitted, and the
    numbers emitted [rows]."""
    drafter, root = CheckedDrafter(DRAFTER, ids and torch.tensor(ids)), torch.zeros(rows, dtype=torch.int64)
    noise, later = noise_of(rows, len(expansion), seed)
    children = children_of(kind, sampling, noise)
    tree = SampledTree(expansion).grow(drafter, root, drafter.state(root[:, None]), children)
    verdict = verify(verifier, tree, sampling, noise)
    tokens = torch.zeros(rows, 4, dtype=torch.int64)
    tokens[:, : verdict.tokens.shape[1]] = verdict.tokens[:, :4]
    return filled_up(tokens, verdict.n, sampling, later), verdict.n


def filled_up(tokens, n, sampling, later):
    for i in range(3):
        before = tokens[:, i - 1] if i else torch.zeros_like(n)
        fresh = draw(filtered_probs(TARGET[before], sampling), later.whole[:, i])
        tokens[:, i] = torch.where(n > i, tokens[:, i], fresh)
    return tokens[:, :3]


def pvalue(tokens, law):
    """Chi-square of tokens [rows, k] against their law [V] * k."""
    place = (tokens * V ** torch.arange(tokens.shape[1]).flip(0)).sum(1)
    return pvalue_of_counts(place.bincount(minlength=law.numel()).double(), law.flatten().double() * len(tokens))


def target_law(sampling):
    p = filtered_probs(TARGET, sampling)
    return torch.einsum("a,ab,bc->abc", p[0], p, p)


CASES = [
    *itertools.product([MultiRoundRejection()], [(1, 1, 1), (3, 2), (4,), (2, 1, 2)]),
    *itertools.product([BlockVerification()], [(1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)]),
    *itertools.product([SampleAndMatch(), TwoThresholds()], [(1, 1, 1), (3, 2)]),
]


@pytest.mark.matrix
@pytest.mark.parametrize("sampling", [WARM, FILTERED], ids=["warm", "filtered"])
@pytest.mark.parametrize("ids", [None, [0, 1, 3, 4]], ids=["all", "some"])
@pytest.mark.parametrize(("verifier", "expansion"), CASES, ids=str)
def test_lossless(verifier, expansion, sampling, ids):
    """With a draft vocabulary of four, top-k and top-p, q is often used up before the children are. Coupled children
    are accepted more often."""
    tokens, n = three_tokens(verifier, expansion, sampling, ids)
    assert pvalue(tokens, target_law(sampling)) > 1e-3
    assert (n > 1).float().mean() > 0.2, "a rule that accepts nothing is lossless too"
    if isinstance(verifier, SampleAndMatch):
        tokens, coupled = three_tokens(verifier, expansion, sampling, ids, kind="coupled")
        assert pvalue(tokens, target_law(sampling)) > 1e-3
        assert coupled.double().mean() > n.double().mean()


def sorted_children(self, logits, vocab, level, count, drawn=Drawn.draw):
    probs, ids = drawn(self, logits, vocab, level, count)
    return probs, ids.gather(-1, probs.gather(-1, ids).argsort(-1, descending=True))


def first_of(p, q):
    return p


RULES = "specdec.verify.rules"
P_FOR_BONUS = f"{RULES}.TwoThresholds._bonus", staticmethod(lambda tree, p, winner: p)
BROKEN = {
    "match: a drafted token where none matches": (Credulous(), None),
    "rejection: p stays whole": (MultiRoundRejection(), (f"{RULES}.residual", first_of)),
    "rejection: q stays whole": (MultiRoundRejection(), (f"{RULES}._without", first_of)),
    "rejection: draws lose their order": (MultiRoundRejection(), ("specdec.children.Drawn.draw", sorted_children)),
    "block: the bonus comes from p": (BlockVerification(), (f"{RULES}.residual", first_of)),
    "sglang: the bonus comes from p": (TwoThresholds(), P_FOR_BONUS),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found_out(name, monkeypatch):
    verifier, patch = BROKEN[name]
    if patch is not None:
        monkeypatch.setattr(*patch)
    tokens, _ = three_tokens(verifier, (1, 1, 1) if verifier.chains_only else (3, 2), WARM)
    assert pvalue(tokens, target_law(WARM)) < 1e-6


# Acceptance: how often a node is left through a child, and how long paths become.


def close(share, expected, rows, spread=0.5):
    """Five standard deviations of a mean of `rows` values whose own is at most `spread`."""
    assert abs(share.item() - expected) < 5 * spread / rows**0.5


@pytest.mark.parametrize("sampling", [WARM, FILTERED], ids=["warm", "filtered"])
def test_block_verification_accepts_more_than_token_by_token(sampling):
    """Enumerate the expected accepted tokens of chains of three: of r_i over prefixes, and of the product of minima."""
    p, q = (filtered_probs(table, sampling).double() for table in (TARGET, DRAFTER))
    block = token_wise = 0.0
    for chain in itertools.product(range(V), repeat=3):
        drawn = reach = product = 1.0
        for i, (a, b) in enumerate(itertools.pairwise((0, *chain))):
            drawn *= q[a, b].item()
            if drawn == 0:
                break
            ratio = (p[a, b] / q[a, b]).item()
            reach, product = min(1, reach * ratio), product * min(1, ratio)
            repeats = V ** (2 - i)  # a prefix is met once for every chain that it begins
            block, token_wise = block + drawn * reach / repeats, token_wise + drawn * product / repeats
    assert block > token_wise + 0.01
    for verifier, expected in ((BlockVerification(), block), (MultiRoundRejection(), token_wise)):
        _, n = three_tokens(verifier, (1, 1, 1), sampling)
        close((n - 1).float().mean(), expected, ROWS, spread=1.5)


# Temperature 0


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [0, 1, 3])  # of which each tree has an accepted path
@pytest.mark.parametrize("name", VERIFIERS)
def test_at_temperature_0_every_rule_is_greedy_matching(name, seed):
    verifier, greedy = make_verifier(name), Sampling()
    root = torch.randint(V, (50,), generator=torch.Generator().manual_seed(seed))
    drafter = CheckedDrafter(DRAFTER)
    start = drafter, root, drafter.state(root[:, None]), children_of("drawn", greedy, None)
    trees = [SampledTree((1, 1, 1, 1)).grow(*start)]
    if not verifier.chains_only:
        trees.append(SampledTree((3, 2, 1)).grow(*start))
        trees.append(random_tree(seed))
        trees[-1].q, trees[-1].topk = torch.zeros(5, 12, 18), 11
    for tree in trees:
        logits = torch.randn(*tree.tokens.shape, 18, generator=torch.Generator().manual_seed(seed))
        logits[..., 6:] -= 2
        logits = logits if tree.q.shape[-1] == 18 else TARGET[tree.tokens]
        ours, theirs = verifier(tree, logits, greedy), sample_and_match(tree, logits, greedy)
        assert torch.equal(ours.n, theirs.n)
        assert torch.equal(ours.path, theirs.path)
        emitted = torch.arange(tree.steps + 1) < ours.n[:, None]
        assert torch.equal(ours.tokens * emitted, theirs.tokens * emitted)
        assert ours.n.max() > 1


# Trees of fixed children: how often a node is left through a child, and the laws of lossy rules


def fixed_tokens(verifier, first: list[int], second: list[int], rows: int):
    """Return the first two tokens after token 0 [rows,2], on a tree of children `first` and `second` under each of
    these, and the numbers emitted [rows]."""
    parents = [0] + [0] * len(first) + [i + 1 for i in range(len(first)) for _ in second]
    parents = torch.tensor(parents).expand(rows, -1)
    tokens = torch.tensor([0, *first, *second * len(first)]).expand(rows, -1)
    ancestors = ancestors_of(parents, 2)
    depth, q = ancestors.sum(-1) - 1, torch.zeros(*tokens.shape, V)
    tree = DraftTree(tokens, parents, depth, ancestors, 2 if second else 1, q=q, topk=max(len(first), len(second)))
    noise, later = noise_of(rows, 2, seed=2)
    verdict = verify(verifier, tree, WARM, noise)
    fresh = draw(filtered_probs(TARGET[verdict.tokens[:, 0]], WARM), later.whole[:, 0])
    return torch.stack([verdict.tokens[:, 0], torch.where(verdict.n > 1, verdict.tokens[:, 1], fresh)], 1), verdict.n


@pytest.mark.matrix
@pytest.mark.parametrize("children", [[1], [1, 4, 2], [2, 4, 1], [5, 3]], ids=str)
@pytest.mark.parametrize("verifier", [SampleAndMatch(), MultiRoundRejection(), TwoThresholds()], ids=str)
def test_a_node_is_left_with_the_probability_of_its_children(verifier, children):
    """In any order. Multi-round rejection of children that nobody drew is the walk of EAGLE-2: accept x with p(x), or
    drop x from p and renormalise."""
    _, n = fixed_tokens(verifier, children, [], ROWS)
    close((n == 2).float().mean(), filtered_probs(TARGET[0], WARM)[children].sum().item(), ROWS)


def thresholds_law(verifier, p, first, second):
    """Return the joint law [V,V] of two tokens under TwoThresholds."""

    def at_node(p, children):
        through, total, left = torch.zeros(V).double(), 0.0, 1.0
        for x in children:
            total += p[x].item()
            reached = 1.0 if p[x] >= verifier.threshold_single else min(1.0, total / verifier.threshold_acc)
            through[x] = max(0.0, reached - (1 - left))
            left -= through[x].item()
        rest = p.clone()
        rest[children] = 0
        return through, left * rest / rest.sum()

    through, bonus = at_node(p[0], first)
    return through[:, None] * torch.stack([sum(at_node(row, second)) for row in p]) + bonus[:, None] * p


def typical_law(verifier, p, first, second):
    """Return the same for typical acceptance, which takes the longest path, and of those the most likely."""
    least = [min(verifier.epsilon, verifier.alpha * (-torch.special.entr(row).sum()).exp()) for row in p]
    singles = [(p[0, x], x) for x in first if p[0, x] > least[0]]
    pairs = [(reach * p[x, y], x, y) for reach, x in singles for y in second if p[x, y] > least[x]]
    law = torch.zeros(V, V).double()
    if pairs:
        law[max(pairs)[1:]] = 1
        return law
    if not singles:
        return p[0][:, None] * p
    x = max(singles)[1]
    law[x] = p[x]
    return law


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("law_of", "rules"),
    [
        (thresholds_law, [TwoThresholds(1.0, t) for t in (1.0, 0.9, 0.7, 0.5, 0.3, 0.1)]),
        (thresholds_law, [TwoThresholds(t, 1.0) for t in (1.0, 0.3, 0.15, 0.1)]),
        (typical_law, [TypicalAcceptance(e, a) for e, a in ((1.0, 6.0), (0.15, 6.0), (1.0, 0.2))]),
    ],
    ids=["threshold_acc", "threshold_single", "typical"],
)
def test_lossy_rules_follow_their_own_law_further_and_further_from_the_target(law_of, rules):
    """Chi-square against each rule's law, whose total variation from the target's law grows."""
    first, second, distances = [2, 0, 3], [1, 4], []
    for verifier in rules:
        law = law_of(verifier, filtered_probs(TARGET, WARM).double(), first, second)
        assert law.sum().item() == pytest.approx(1)
        distances.append((law - target_law(WARM).sum(2)).abs().sum().item() / 2)
        tokens, _ = fixed_tokens(verifier, first, second, 20_000)
        if (law > 0).sum() > 1:
            assert pvalue(tokens, law) > 1e-3
        else:
            assert (tokens == law.nonzero()[0]).all()
    assert distances[0] < 1e-6
    assert all(b > a + 0.01 for a, b in itertools.pairwise(distances)), distances
