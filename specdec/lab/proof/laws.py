"""Verifiers against exact laws, on a target and a drafter that are tables, and sampled text of a real pair.

The tables' distributions p and q of the next token depend on the token before it alone, so the law of several tokens is
known. What a verifier emits on trees drawn from the drafter must follow the target's joint law of three tokens; where
fewer than three tokens were emitted, the others are drawn from the target. The law of a whole text of a real pair
cannot be enumerated, but the law of each token given those before it can.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from specdec.children import children_of, kind_for
from specdec.contracts import Drafter, DraftState, TreePolicy
from specdec.drafters.vocab import DraftVocab
from specdec.engine.engine import Engine
from specdec.engine.sequence import Sequence
from specdec.lab.proof.equality import SLACK
from specdec.model.language_model import LanguageModel
from specdec.sampling.filters import draw, filtered_probs
from specdec.sampling.noise import Noise, hashes_of
from specdec.structs import DraftTree, Sampling, Verifier
from specdec.trees.base import ancestors_of

VOCAB = 6
BINS = 20  # of places in a distribution
LEAST_EXPECTED = 5.0  # cells of a smaller expected count are counted together


class TableDrafter(Drafter):
    """A drafter whose distribution depends on the last token alone. Any tree policy can grow its trees."""

    def __init__(self, logits: Tensor, ids: Tensor | None = None):
        """Logits [V,V]: row t are those of the token after t. ids [U]: the tokens that are proposed; None: all."""
        super().__init__()
        self.logits, self.vocab = logits, DraftVocab(len(logits), ids)

    def state(self, tokens: Tensor) -> DraftState:
        """The state at these tokens [B,W]."""
        return DraftState(torch.zeros(*tokens.shape, 1), self.vocab.select(self.logits[tokens]))

    @override
    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        return self.state(tokens)


def table_logits() -> tuple[Tensor, Tensor]:
    """Logits [V,V] of a target, and of a drafter that knows it badly enough to draft what the target never says."""
    generator = torch.Generator().manual_seed(11)
    target, other = (torch.randn(VOCAB, VOCAB, generator=generator) * 1.5 for _ in range(2))
    return target, target + other


@dataclass
class LawProof:
    """What became of three tokens, drawn many times, against their law."""

    draws: int
    emitted: float  # tokens a round: it is 1 for a rule that accepts nothing
    impossible: int  # draws to which the law gives no probability
    pvalue: float  # chi-square
    distance: float  # total variation between the law and what was seen
    noise: float  # the distance that 99 % of samples of the law itself stay below


def three_tokens(
    policy: TreePolicy, verifier: Verifier, sampling: Sampling, draws: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The three tokens [draws,3] after token 0, and how many were emitted [draws]; the target draws the others."""
    target, drafter = table_logits()[0], TableDrafter(table_logits()[1])
    rows = Noise([(seed, row) for row in range(draws)], hashes_of(torch.arange(VOCAB)))
    root = torch.zeros(draws, dtype=torch.int64)
    noise, later = rows.after(root, policy.steps + 1), rows.after(root + policy.steps + 1, 3)
    children = children_of(kind_for(verifier, policy), sampling, noise)
    tree = policy.grow(drafter, root, drafter.state(root[:, None]), children)
    verdict = verifier(tree, target[tree.tokens], sampling, noise)
    tokens = torch.zeros(draws, max(4, verdict.tokens.shape[1]), dtype=torch.int64)
    tokens[:, : verdict.tokens.shape[1]] = verdict.tokens
    for i in range(3):
        before = tokens[:, i - 1] if i else root
        fresh = draw(filtered_probs(target[before], sampling), later.whole[:, i])
        tokens[:, i] = torch.where(verdict.n > i, tokens[:, i], fresh)
    return tokens[:, :3], verdict.n


def prove_law(
    policy: TreePolicy, verifier: Verifier, sampling: Sampling, draws: int = 100_000, seed: int = 0
) -> LawProof:
    """Draw three tokens many times, and compare them with their joint law."""
    tokens, n = three_tokens(policy, verifier, sampling, draws, seed)
    p = filtered_probs(table_logits()[0], sampling).double()
    law = torch.einsum("a,ab,bc->abc", p[0], p, p).flatten()
    chance = np.random.default_rng(seed).multinomial(draws, (law / law.sum()).numpy(), size=500)
    place = (tokens * VOCAB ** torch.arange(3).flip(0)).sum(1)
    seen = place.bincount(minlength=law.numel()).double()
    return LawProof(
        draws=draws,
        emitted=n.double().mean().item(),
        impossible=int(seen[law == 0].sum()),
        pvalue=chi_square(seen, law * draws),
        distance=(seen / draws - law).abs().sum().item() / 2,
        noise=float(np.quantile(np.abs(chance / draws - (law / law.sum()).numpy()).sum(1) / 2, 0.99)),
    )


def chi_square(seen: Tensor, expected: Tensor) -> float:
    """The p-value of counts [K] against expected ones of the same sum: 0 after the impossible, NaN of few counts."""
    if seen[expected == 0].sum() > 0:
        return 0.0
    rare = expected < LEAST_EXPECTED
    seen, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (seen, expected))
    if expected[-1] < LEAST_EXPECTED:
        seen, expected = seen[:-1], expected[:-1]
    if len(seen) < 2:
        return math.nan
    expected = expected * (seen.sum() / expected.sum())
    statistic = ((seen - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), statistic / 2).item()


def exact_distance(verifier: Verifier, sampling: Sampling) -> float:
    """Total variation between a rule's law of two tokens on one fixed tree and the target's law, without sampling.

    The tree is a root (token 0) with two children (2 and 4), and one child of the first (1). The rule's only random
    draw must be the target's token at every node, as `match`'s. Every combination of those draws is passed to the rule
    as logits with one most likely token, weighted by the product of the probabilities.
    """
    p = filtered_probs(table_logits()[0], sampling).double()
    tokens, parents, depth = torch.tensor([[[0, 2, 4, 1]], [[0, 0, 0, 1]], [[0, 1, 1, 2]]])
    outcomes = torch.tensor(list(itertools.product(range(VOCAB), repeat=tokens.shape[1])))  # [V^N,N]
    weights = p[tokens.expand(len(outcomes), -1)].gather(-1, outcomes[..., None]).squeeze(-1).prod(1)
    outcomes, weights = outcomes[weights > 0], weights[weights > 0]
    parts = tokens, parents, depth, ancestors_of(parents, 2)
    one, two, three, four = (x.expand(len(outcomes), *x.shape[1:]) for x in parts)
    tree = DraftTree(one, two, three, four, 2)
    verdict = verifier(tree, F.one_hot(outcomes, VOCAB).float(), Sampling(), None)
    law = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    first, second, alone = verdict.tokens[:, 0], verdict.tokens[:, 1], verdict.n == 1
    law.index_put_((first[~alone], second[~alone]), weights[~alone], accumulate=True)
    ended = torch.zeros(VOCAB, dtype=torch.float64).index_put_((first[alone],), weights[alone], accumulate=True)
    law += ended[:, None] * p  # the second token is drawn in the next round
    return (law - p[0][:, None] * p).abs().sum().item() / 2


def significance(tests: int, level: float = 1e-3) -> float:
    """The p-value below which one of so many tests is no accident (Bonferroni)."""
    return level / max(tests, 1)


# Text of a real pair


@dataclass
class SampledProof:
    """What became of the tokens that one drafter and tree emitted."""

    tokens: int
    outside: int  # tokens that the filters exclude, given the tokens before them
    pvalue: float  # chi-square: are the tokens' places in the target's distributions uniform?


def prove_sampled(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, max_new_tokens: int, seed: int = 0
) -> SampledProof:
    """Test whether the places of the tokens in the target's own distributions are uniform.

    A token's place is the probability of all likelier tokens given the text before it, and a random part of its own
    probability (Rosenblatt's transform, 1952). The places of tokens that are drawn from these distributions are
    independent and uniform on [0, 1], however the tokens were drafted.
    """
    assert not sampling.penalised, "the distributions are those of the target without penalties"
    generator = torch.Generator().manual_seed(seed)
    places, outside = [], 0
    for number, prompt in enumerate(prompts):
        row = engine.generate([prompt], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed + number).rows[0]
        own, beyond = _places(engine.target, row, sampling, generator)
        places.append(own)
        outside += beyond
    u = torch.cat(places)
    seen = (u * BINS).long().clamp_(max=BINS - 1).bincount(minlength=BINS).double()
    return SampledProof(len(u), outside, chi_square(seen, torch.full_like(seen, len(u) / BINS)))


@torch.inference_mode()
def _places(target: LanguageModel, row: Sequence, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, int]:
    text = torch.tensor([row.prompt + row.tokens], device=target.device)
    logits = target(text, None)[0][0, len(row.prompt) - 1 : -1].float().cpu()
    tokens = torch.tensor(row.tokens)[:, None]
    p = filtered_probs(logits, sampling)
    wider = filtered_probs(logits, replace(sampling, top_p=min(1.0, sampling.top_p + SLACK)))
    own = p.gather(1, tokens)
    likelier = torch.where(p > own, p, 0).sum(1).double()
    equal = torch.where(p == own, p, 0).sum(1).double()
    u = likelier + equal * torch.rand(len(tokens), generator=generator, dtype=torch.float64)
    return u, int((wider.gather(1, tokens) == 0).sum())
