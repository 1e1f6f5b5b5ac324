"""Every rule against the law that it must follow, on a target and a drafter that are tables: p and q of the next token
depend on the token before, so that laws of several tokens are known exactly."""

import itertools

import pytest
import torch
from helpers import Credulous, pvalue_of_counts
from test_verify import random_tree

from specdec.children import Drawn, children_of
from specdec.lab.proof.laws import TableDrafter
from specdec.sampling.draws import draw
from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import Noise, hashes_of
from specdec.structs import DraftTree, Sampling
from specdec.trees import SampledTree
from specdec.trees.ancestors import ancestors_of
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


class CheckedDrafter(TableDrafter):
    """Looks at what ancestors a tree policy gives to it."""

    def __init__(self, ids=None):
        super().__init__(DRAFTER, None if ids is None else torch.tensor(ids))

    def step(self, tokens, hidden, level, ancestors):
        assert ancestors.shape == (*tokens.shape, level * tokens.shape[1])
        assert ancestors[:, :, -tokens.shape[1] :].diagonal(dim1=1, dim2=2).all()
        return super().step(tokens, hidden, level, ancestors)


def noise_of(rows: int, steps: int, seed: int = 0):
    """The noise of the positions behind token 0 of so many rows, and of three positions beyond these."""
    noise, root = Noise([(seed, row) for row in range(rows)], hashes_of(torch.arange(V))), torch.zeros(rows).long()
    return noise.behind(root, steps + 1), noise.behind(root + steps + 1, 3)


def verify(verifier, tree: DraftTree, sampling: Sampling, noise):
    return verifier(tree, TARGET[tree.tokens], sampling, noise)


def three_tokens(verifier, expansion, sampling, ids=None, rows=ROWS, seed=0, kind="drawn"):
    """The first three tokens after token 0 [rows,3]: the emitted ones, and draws from the target where they are fewer;
    and the numbers emitted [rows]."""
    drafter, root = CheckedDrafter(ids), torch.zeros(rows, dtype=torch.int64)
    noise, later = noise_of(rows, len(expansion), seed)
    children = children_of(kind, sampling, noise)
    tree = SampledTree(expansion).grow(drafter, root, drafter.state(root[:, None]), children)
    verdict = verify(verifier, tree, sampling, noise)
    tokens = torch.zeros(rows, 4, dtype=torch.int64)
    tokens[:, : verdict.tokens.shape[1]] = verdict.tokens[:, :4]
    return filled_up(tokens, verdict.n, sampling, later), verdict.n


def filled_up(tokens, n, sampling, later):
    """The first three tokens [rows,3]; those that were not among the n emitted ones are drawn from the target."""
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
@pytest.mark.parametrize("expansion", [(1, 1, 1), (3, 2)], ids=str)
def test_children_that_are_coupled_leave_the_law_as_it_is(expansion, sampling, ids):
    tokens, n = three_tokens(SampleAndMatch(), expansion, sampling, ids, kind="coupled")
    assert pvalue(tokens, target_law(sampling)) > 1e-3
    drawn = three_tokens(SampleAndMatch(), expansion, sampling, ids)[1]
    assert n.double().mean() > drawn.double().mean()


@pytest.mark.matrix
@pytest.mark.parametrize("sampling", [WARM, FILTERED], ids=["warm", "filtered"])
@pytest.mark.parametrize("ids", [None, [0, 1, 3, 4]], ids=["all", "some"])
@pytest.mark.parametrize(("verifier", "expansion"), CASES, ids=str)
def test_lossless(verifier, expansion, sampling, ids):
    """With a draft vocabulary of four, and top-k and top-p beside, q is often used up before the children are."""
    tokens, n = three_tokens(verifier, expansion, sampling, ids)
    assert pvalue(tokens, target_law(sampling)) > 1e-3
    assert (n > 1).float().mean() > 0.2, "a rule that accepts nothing is lossless too"


def sorted_children(self, logits, vocab, level, count, drawn=Drawn.draw):
    probs, ids = drawn(self, logits, vocab, level, count)
    return probs, ids.gather(-1, probs.gather(-1, ids).argsort(-1, descending=True))


def first_of(p, q):
    return p


REJECTION, BLOCK, THRESHOLDS = "specdec.verify.rejection", "specdec.verify.block", "specdec.verify.thresholds"
P_FOR_BONUS = f"{THRESHOLDS}.TwoThresholds._bonus", staticmethod(lambda tree, p, winner: p)
BROKEN = {
    "match: a drafted token where none matches": (Credulous(), None),
    "rejection: p stays whole": (MultiRoundRejection(), (f"{REJECTION}.residual", first_of)),
    "rejection: q stays whole": (MultiRoundRejection(), (f"{REJECTION}._without", first_of)),
    "rejection: draws lose their order": (MultiRoundRejection(), ("specdec.children.Drawn.draw", sorted_children)),
    "block: the bonus comes from p": (BlockVerification(), (f"{BLOCK}.residual", first_of)),
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


def flat_tree(children: list[int], rows: int) -> DraftTree:
    """A root (token 0) and its children, not drawn from anything."""
    n = len(children) + 1
    parents = torch.zeros(rows, n, dtype=torch.int64)
    tokens = torch.tensor([0, *children]).expand(rows, n)
    return DraftTree(
        tokens, parents, (torch.arange(n) > 0).long().expand(rows, n), ancestors_of(parents, 1), 1,
        q=torch.zeros(rows, n, V), topk=n - 1,
    )  # fmt: skip


def close(share, expected, rows, spread=0.5):
    """Five standard deviations of a mean of `rows` values whose own is at most `spread`."""
    assert abs(share.item() - expected) < 5 * spread / rows**0.5


@pytest.mark.matrix
@pytest.mark.parametrize("children", [[1], [1, 4, 2], [2, 4, 1], [5, 3]], ids=str)
@pytest.mark.parametrize("verifier", [SampleAndMatch(), MultiRoundRejection(), TwoThresholds()], ids=str)
def test_a_node_is_left_with_the_probability_of_its_children(verifier, children):
    """Whatever their order. Multi-round rejection of children that nobody drew is the walk of EAGLE-2: accept x with
    p(x), or drop x from p and renormalise."""
    verdict = verify(verifier, flat_tree(children, ROWS), WARM, noise_of(ROWS, 1, seed=1)[0])
    p = filtered_probs(TARGET[0], WARM)
    close((verdict.n == 2).float().mean(), p[children].sum().item(), ROWS)


@pytest.mark.parametrize("sampling", [WARM, FILTERED], ids=["warm", "filtered"])
def test_multi_round_rejection_accepts_as_often_as_it_should(sampling):
    """Two children: enumerated over all that can be drawn."""
    p, q = (filtered_probs(table[0], sampling).double() for table in (TARGET, DRAFTER))
    expected = 0.0
    for x, y in itertools.permutations(q.nonzero().flatten().tolist(), 2):
        first = min(1, (p[x] / q[x]).item())
        left = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
        then = q[y] / (1 - q[x])
        expected += (q[x] * then * (first + (1 - first) * min(1, (left[y] / then).item()))).item()
    _, n = three_tokens(MultiRoundRejection(), (2,), sampling)
    close((n == 2).float().mean(), expected, ROWS)


@pytest.mark.parametrize("sampling", [WARM, FILTERED], ids=["warm", "filtered"])
def test_block_verification_accepts_more_than_token_by_token(sampling):
    """Expected accepted tokens of chains of three: the mean of r_i over prefixes, against the product of the minima;
    the verifiers' averages are those."""
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
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", VERIFIERS)
def test_at_temperature_0_every_rule_is_greedy_matching(name, seed):
    verifier, greedy = make_verifier(name), Sampling()
    root = torch.randint(V, (50,), generator=torch.Generator().manual_seed(seed))
    drafter = CheckedDrafter()
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


# Lossy rules: by how much


def node_law(verifier, p, children):
    """What TwoThresholds emits at a node of p [V]: (law of leaving through a child [V], law of the bonus [V])."""
    through, total, left = torch.zeros(V).double(), 0.0, 1.0
    for x in children:
        total += p[x].item()
        reached = 1.0 if p[x] >= verifier.threshold_single else min(1.0, total / verifier.threshold_acc)
        through[x] = max(0.0, reached - (1 - left))
        left -= through[x].item()
    rest = p.clone()
    rest[children] = 0
    return through, left * rest / rest.sum()


def thresholds_law(verifier, sampling, first, second):
    """The joint law [V,V] of two tokens under TwoThresholds: the root's children are `first`, theirs are `second`."""
    p = filtered_probs(TARGET, sampling).double()
    through, bonus = node_law(verifier, p[0], first)
    after_child = torch.stack([sum(node_law(verifier, row, second)) for row in p])
    return through[:, None] * after_child + bonus[:, None] * p


def typical_law(verifier, sampling, first, second):
    """The same for typical acceptance, which takes the longest path, and of those the likeliest."""
    p = filtered_probs(TARGET, sampling).double()
    typical = [
        {x for x in range(V) if row[x] > min(verifier.epsilon, verifier.alpha * (-torch.special.entr(row).sum()).exp())}
        for row in p
    ]
    pairs = [(p[0, x] * p[x, y], x, y) for x in first for y in second if x in typical[0] and y in typical[x]]
    singles = [(p[0, x], x) for x in first if x in typical[0]]
    law = torch.zeros(V, V).double()
    if pairs:
        _, x, y = max(pairs)
        law[x, y] = 1
    elif singles:
        _, x = max(singles)
        law[x] = p[x]
    else:
        law = p[0][:, None] * p
    return law


LOOSER = {
    "threshold_acc": [TwoThresholds(1.0, t) for t in (1.0, 0.9, 0.7, 0.5, 0.3, 0.1)],
    "threshold_single": [TwoThresholds(t, 1.0) for t in (1.0, 0.3, 0.15, 0.1)],
    "typical": [TypicalAcceptance(e, a) for e, a in ((1.0, 6.0), (0.15, 6.0), (1.0, 0.2))],
}
FIRST, SECOND = [2, 0, 3], [1, 4]


@pytest.mark.matrix
@pytest.mark.parametrize("name", LOOSER)
def test_lossy_rules_follow_their_own_law_further_and_further_from_the_target(name):
    """Total variation between the target's law of two tokens and the emitted one, by enumeration; and chi-square of
    what is emitted against the latter."""
    rows, law_of = 20_000, typical_law if name == "typical" else thresholds_law
    distances = []
    for verifier in LOOSER[name]:
        law = law_of(verifier, WARM, FIRST, SECOND)
        assert law.sum().item() == pytest.approx(1)
        distances.append((law - target_law(WARM).sum(2)).abs().sum().item() / 2)
        tokens = two_tokens(verifier, rows)
        if (law > 0).sum() > 1:
            assert pvalue(tokens, law) > 1e-3
        else:
            assert (tokens == law.nonzero()[0]).all()
    assert distances[0] < 1e-6
    assert all(b > a + 0.01 for a, b in itertools.pairwise(distances)), distances


def two_tokens(verifier, rows):
    """The first two tokens after token 0 [rows,2] on a tree of FIRST, and SECOND under each of them."""
    parents = torch.tensor([0] + [0] * len(FIRST) + [i + 1 for i in range(len(FIRST)) for _ in SECOND]).expand(rows, -1)
    tokens = torch.tensor([0, *FIRST, *SECOND * len(FIRST)]).expand(rows, -1)
    depth = torch.tensor([0] + [1] * len(FIRST) + [2] * len(SECOND) * len(FIRST)).expand(rows, -1)
    tree = DraftTree(tokens, parents, depth, ancestors_of(parents, 2), 2)
    noise, later = noise_of(rows, 2, seed=2)
    verdict = verify(verifier, tree, WARM, noise)
    fresh = draw(filtered_probs(TARGET[verdict.tokens[:, 0]], WARM), later.whole[:, 0])
    return torch.stack([verdict.tokens[:, 0], torch.where(verdict.n > 1, verdict.tokens[:, 1], fresh)], 1)
