"""All tests of losslessness: what is tested, and with what."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from specdec.contracts import Drafter, TreePolicy
from specdec.lab.proof.equality import EqualityProof, EqualityProver
from specdec.lab.proof.laws import LawProof, exact_distance, prove_law, significance
from specdec.lab.proof.rollback import RollbackProof, prove_rollback
from specdec.lab.proof.sampled import SampledProof, prove_sampled
from specdec.model.target import Target
from specdec.structs import DraftTree, Sampling, Verdict, Verifier
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.trees.spec import TreeSpec, describe
from specdec.verify import VERIFIERS, make_verifier

TEXTS = {"greedy": Sampling(), "temperature 1": Sampling(1.0), "filtered": Sampling(0.8, top_k=50, top_p=0.9)}
SAMPLINGS = {"temperature 1": Sampling(1.0), "filtered": Sampling(0.8, top_k=4, top_p=0.9)}
NUCLEUS = Sampling(1.0, top_p=0.9)
LAW_TREES = (Chain(3), DynamicTree(3, 2, 8), SampledTree((1, 1, 1)), SampledTree((3, 2)), SampledTree((2, 1, 2)))


class OneInAThousand:
    """A broken rule, to see that the proof finds it: one of a thousand emitted tokens is a draft that was refused."""

    lossless: ClassVar[bool] = True

    def __init__(self, inner: Verifier, rate: float = 1e-3):
        self.inner, self.rate, self.owed = inner, rate, 0.0
        self.needs_q, self.chains_only = inner.needs_q, inner.chains_only
        self.likeliest_only, self.couples = inner.likeliest_only, inner.couples
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, tree: DraftTree, logits: Tensor, sampling: Sampling, noise=None) -> Verdict:
        verdict = self.inner(tree, logits, sampling, noise)
        refused = verdict.n == 1  # the first drafts among them
        self.owed += self.rate * verdict.n.sum().item()
        chance = max(self.owed, 0.0) / max(refused.sum().item(), 1)
        wrong = refused & (torch.rand(len(refused), generator=self.generator) < chance).to(refused.device)
        self.owed -= wrong.sum().item()
        verdict.tokens[:, 0] = torch.where(wrong, tree.tokens[:, 1], verdict.tokens[:, 0])
        return verdict


@dataclass
class Proof:
    """Everything that was tested, and what came of it."""

    equal: list[tuple[str, str, str, EqualityProof]] = field(default_factory=list)  # drafter, tree, sampling
    laws: list[tuple[str, str, str, LawProof]] = field(default_factory=list)  # verifier, tree, sampling
    exact: list[tuple[str, str, float]] = field(default_factory=list)  # verifier, sampling, total variation
    sampled: list[tuple[str, str, SampledProof]] = field(default_factory=list)  # drafter, tree
    rollback: list[tuple[str, RollbackProof]] = field(default_factory=list)  # how rows were decoded

    @property
    def threshold(self) -> float:
        """The p-value below which a test has failed."""
        return significance(len(self.laws) + len(self.sampled))

    def unequal(self) -> int:
        """The number of texts that differ from plain decoding for no numerical reason."""
        return sum(proof.bugs for *_, proof in self.equal)

    def left_behind(self) -> int:
        """The number of cases in which a rejected draft left something in the target's caches."""
        return sum(proof.bugs for _, proof in self.rollback)

    def statistical_bugs(self) -> int:
        """The number of tests whose result is no accident."""
        return (
            sum(law.pvalue < self.threshold for *_, law in self.laws)
            + sum(s.outside > 0 or s.pvalue < self.threshold for *_, s in self.sampled)
            + sum(distance > 1e-6 for *_, distance in self.exact)
        )

    @property
    def sound(self) -> bool:
        return not self.unequal() and not self.left_behind() and not self.statistical_bugs()


def fits(verifier: Verifier, tree: TreePolicy) -> bool:
    return (tree.samples or not verifier.needs_q) and (tree.topk == 1 or not verifier.chains_only)


def trees_for(target: Target, drafter: Drafter) -> list[TreePolicy]:
    depth = drafter.deepest(5)
    chains_only = target.chains_only or drafter.chains_only
    return [Chain(depth)] if chains_only else [TreeSpec(4, depth).build(), Chain(depth)]


def prove(
    target: Target,
    drafters: dict[str, Drafter],
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    draws: int,
    seed: int = 0,
    self_test: bool = False,
) -> Proof:
    """Run all tests. prompts: token ids; draws: of three tokens, for each rule, tree and sampling.

    self_test: break the rules (`OneInAThousand`), to see that the proof finds it."""

    def rule(name: str) -> Verifier:
        verifier = make_verifier(name)
        return OneInAThousand(verifier) if self_test else verifier

    names = [name for name in VERIFIERS if make_verifier(name).lossless]
    cases = [(name, tree) for name in names for tree in LAW_TREES if fits(make_verifier(name), tree)]
    pairs = [(name, tree) for name, drafter in drafters.items() for tree in trees_for(target, drafter)]
    proof = Proof()
    for how, together in (("all rows together", True), ("one row at a time", False)):
        proof.rollback.append((how, prove_rollback(target, prompts[:3], together=together, seed=seed)))
    provers = {}
    with tqdm(total=2 * len(cases) + 4 * len(pairs) + 1, desc="proving", leave=False) as bar:
        for how, sampling in TEXTS.items():
            provers[how] = EqualityProver(target, prompts, max_new_tokens, sampling, seed)
        bar.update()
        for name, tree in pairs:
            for how, prover in provers.items():
                proof.equal.append((name, describe(tree), how, prover.prove(drafters[name], tree, rule("match"))))
                bar.update()
        for name, tree in cases:
            for how, sampling in SAMPLINGS.items():
                proof.laws.append((name, describe(tree), how, prove_law(tree, rule(name), sampling, draws)))
                bar.update()
        if not self_test:  # a rule with chances of its own has no law to enumerate
            proof.exact = [("match", how, exact_distance(rule("match"), s)) for how, s in SAMPLINGS.items()]
        for name, tree in pairs:
            match = rule("match")
            sampled = prove_sampled(target, drafters[name], tree, match, prompts, NUCLEUS, max_new_tokens, seed)
            proof.sampled.append((name, describe(tree), sampled))
            bar.update()
    return proof
