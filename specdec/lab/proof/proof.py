"""All tests of losslessness: what is tested, with what, and the result as a Markdown page, as tables and as JSON."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import product
from math import isnan
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine
from specdec.lab.proof.equality import SLACK, EqualityProof, EqualityProver
from specdec.lab.proof.laws import LawProof, SampledProof, exact_distance, prove_law, prove_sampled, significance
from specdec.lab.proof.rollback import RollbackProof, prove_rollback
from specdec.model.language_model import LanguageModel
from specdec.structs import DraftTree, Sampling, Verdict, Verifier
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.trees.spec import describe
from specdec.verify import VERIFIERS, make_verifier

TEXTS = {"greedy": Sampling(), "temperature 1": Sampling(1.0), "filtered": Sampling(0.8, top_k=50, top_p=0.9)}
SAMPLINGS = {"temperature 1": Sampling(1.0), "filtered": Sampling(0.8, top_k=4, top_p=0.9)}
NUCLEUS = Sampling(1.0, top_p=0.9)
Labels = dict[str, str]  # of a test: drafter or rule, tree and sampling, or how rows were decoded
LAW_TREES = (Chain(3), DynamicTree(3, 2, 8), SampledTree((1, 1, 1)), SampledTree((3, 2)), SampledTree((2, 1, 2)))


class OneInAThousand:
    """A broken rule, to see that the proof finds it: one of a thousand emitted tokens is a draft that was refused."""

    lossless = True

    def __init__(self, inner: Verifier):
        """Break the rule `inner`."""
        self.inner, self.owed = inner, 0.0
        self.needs_q, self.chains_only = inner.needs_q, inner.chains_only
        self.likeliest_only, self.couples = inner.likeliest_only, inner.couples
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, tree: DraftTree, logits: Tensor, sampling: Any, noise=None) -> Verdict:
        """Verify a tree, then replace some emitted tokens by refused drafts."""
        verdict = self.inner(tree, logits, sampling, noise)
        refused = verdict.n == 1  # the first drafts among them
        self.owed += 1e-3 * verdict.n.sum().item()
        chance = max(self.owed, 0.0) / max(refused.sum().item(), 1)
        wrong = refused & (torch.rand(len(refused), generator=self.generator) < chance).to(refused.device)
        self.owed -= wrong.sum().item()
        verdict.tokens[:, 0] = torch.where(wrong, tree.tokens[:, 1], verdict.tokens[:, 0])
        return verdict


@dataclass
class Proof:
    """All tests and their results."""

    equal: list[tuple[Labels, EqualityProof]] = field(default_factory=list)
    laws: list[tuple[Labels, LawProof]] = field(default_factory=list)
    exact: list[tuple[Labels, float]] = field(default_factory=list)  # total variation
    sampled: list[tuple[Labels, SampledProof]] = field(default_factory=list)
    rollback: list[tuple[Labels, RollbackProof]] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        """The p-value below which a test has failed."""
        return significance(len(self.laws) + len(self.sampled))

    @property
    def bugs(self) -> dict[str, int]:
        """Count texts that differ for no numerical reason, failed tests of laws, and caches with rejected drafts."""
        failed = [law.pvalue < self.threshold for _, law in self.laws]
        failed += [s.outside > 0 or s.pvalue < self.threshold for _, s in self.sampled]
        failed += [distance > 1e-6 for _, distance in self.exact]
        unequal, left = sum(p.bugs for _, p in self.equal), sum(p.bugs for _, p in self.rollback)
        return {"unequal_texts": unequal, "statistical_bugs": sum(failed), "left_behind": left}

    @property
    def sound(self) -> bool:
        """Whether every test passed."""
        return not any(self.bugs.values())


def fits(verifier: Verifier, tree: TreePolicy) -> bool:
    """Return whether the verifier can verify trees of this policy."""
    return (tree.samples or not verifier.needs_q) and (tree.topk == 1 or not verifier.chains_only)


def trees_for(target: LanguageModel, drafter: Drafter, verifier: Verifier) -> list[TreePolicy]:
    """Return the tree policies to test: a chain and, unless the pair takes chains only, a dynamic tree.

    Of a verifier that needs drawn trees: a drawn chain.
    """
    depth = drafter.deepest(5)
    if verifier.needs_q:
        return [SampledTree((1,) * depth)]
    chains_only = target.chains_only or drafter.chains_only
    return [Chain(depth)] if chains_only else [DynamicTree(4, depth), Chain(depth)]


def prove(
    target: LanguageModel,
    drafters: dict[str, Drafter],
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    draws: int,
    seed: int = 0,
    self_test: bool = False,
    verifier: str | None = None,
    tree: TreePolicy | None = None,
) -> Proof:
    """Run all tests. prompts: token ids; draws: of three tokens, for each rule, tree and sampling.

    self_test: break the rules (`OneInAThousand`), to see that the proof finds it.
    verifier, tree: the only rule and the only tree that are tested. Raises ValueError if the rule does not take the
    tree.
    """

    def rule(name: str) -> Verifier:
        verifier = make_verifier(name)
        return OneInAThousand(verifier) if self_test else verifier

    names = [verifier] if verifier else [name for name in VERIFIERS if make_verifier(name).lossless]
    trees = [tree] if tree else LAW_TREES
    cases = [(name, tree) for name in names for tree in trees if fits(make_verifier(name), tree)]
    if not cases:
        raise ValueError(f"the verifier {verifier} does not take the tree {tree}: give another tree")
    decodes = verifier or "match"
    decoding = rule(decodes)
    chosen = {name: [tree] if tree else trees_for(target, drafter, decoding) for name, drafter in drafters.items()}
    pairs = [(name, one) for name, few in chosen.items() for one in few if fits(decoding, one)]
    texts = list(product(pairs, TEXTS)) if decoding.couples else []
    proof = Proof()
    enumerated = SAMPLINGS if "match" in names and not self_test else ()  # other chances have no law to enumerate
    count = 2 + len(texts) + len(pairs) + 2 * len(cases) + len(enumerated)
    with tqdm(total=count, desc="proving", leave=False) as bar:

        def add(results: list, found: object, **labels: str) -> None:
            results.append((labels, found))
            bar.update()

        for how, together in (("all rows together", True), ("one row at a time", False)):
            add(proof.rollback, prove_rollback(target, prompts[:3], together=together, seed=seed), rows=how)
        provers = {how: EqualityProver(target, prompts, max_new_tokens, TEXTS[how], seed) for how in TEXTS}
        for (name, one), how in texts:
            found = provers[how].prove(drafters[name], one, rule(decodes))
            add(proof.equal, found, drafter=name, tree=describe(one), sampling=how)
        for (name, one), how in product(cases, SAMPLINGS):
            law = prove_law(one, rule(name), SAMPLINGS[how], draws)
            add(proof.laws, law, rule=name, tree=describe(one), sampling=how)
        for how in enumerated:
            add(proof.exact, exact_distance(rule("match"), SAMPLINGS[how]), rule="match", sampling=how)
        for name, one in pairs:
            engine = Engine(target, drafters[name], one, rule(decodes))
            sampled = prove_sampled(engine, prompts, NUCLEUS, max_new_tokens, seed)
            add(proof.sampled, sampled, drafter=name, tree=describe(one))
    return proof


def verdict_line(proof: Proof) -> str:
    """Return the result of all tests in one line."""
    if proof.sound:
        return f"No bug found; {sum(p.ties for _, p in proof.equal)} numerical ties."
    return (
        "NOT LOSSLESS: {unequal_texts} texts differ for no numerical reason, in {left_behind} cases a rejected draft "
        "left something in the caches, {statistical_bugs} statistical tests failed."
    ).format(**proof.bugs)


def sections(proof: Proof) -> list[tuple[str, list[str], list[list[str]], str]]:
    """(title, columns, rows, note) of each part that has rows."""
    parts: list[tuple[str, list, str, Callable[[Any], Iterable], str]] = [
        (
            "Text against plain decoding of the same seed, token for token",
            proof.equal,
            "tokens, rounds, identical, ties, bugs",
            lambda p: (p.tokens, p.rounds, f"{p.same} of {p.texts}", p.ties, p.bugs),
            "Tie: the first differing token and plain decoding's are those of the two largest scores (logit / "
            "temperature + noise), which, in a finer dtype, lie within four times the largest rounding error there; or "
            f"the edge of a filter, moved by {SLACK:g}, decides between them.",
        ),
        (
            "What rejected drafts leave in the target's caches",
            proof.rollback,
            "cases, other states, other logits, by rounding, not the plain text's, largest",
            lambda p: (p.cases, p.states, p.logits, p.rounded, p.astray, f"{p.largest:.1e}"),
            "The same tokens are accepted after different rejected drafts: the caches, and the next logits, must be "
            "the same bits. By rounding: experts, which compute tokens together. Largest: difference of a logit from "
            "the plain text's, as a share of their range.",
        ),
        (
            "Every lossless rule against the exact law of three tokens, on tables",
            proof.laws,
            "draws, tokens a round, impossible, p, TV, TV of chance (99 %)",
            lambda p: f"{p.draws} {p.emitted:.2f} {p.impossible} {p.pvalue:.2g} {p.distance:.4f} {p.noise:.4f}".split(),
            f"impossible: draws to which the law gives no probability. p: of a chi-square test; below "
            f"{proof.threshold:.1e} it is a bug ({len(proof.laws) + len(proof.sampled)} tests together). TV: total "
            "variation distance of the draws from the exact law. filtered: temperature 0.8, top-k, top-p.",
        ),
        (
            "By enumeration, without sampling",
            proof.exact,
            "TV from the target",
            lambda distance: (f"{distance:.1e}",),
            "The law of two tokens, over all outcomes of the draws at a tree's nodes; `match` has no other chance.",
        ),
        (
            "Sampled text of the pair, top-p 0.9",
            proof.sampled,
            "tokens, outside the filter, p",
            lambda p: (p.tokens, p.outside, "too few" if isnan(p.pvalue) else f"{p.pvalue:.2g}"),
            "p: are the tokens' places in the target's own distributions, given the text before them, uniform?",
        ),
    ]
    found = []
    for title, results, columns, cells, note in parts:
        if results:
            rows = [[*labels.values(), *map(str, cells(p))] for labels, p in results]
            found.append((title, [*results[0][0], *columns.split(", ")], rows, note))
    return found


def markdown(proof: Proof, conditions: str) -> str:
    """Return the report as a Markdown page. `conditions` is a line about models and settings."""
    lines = ["# Is it lossless?", "", f"**{verdict_line(proof)}**", "", conditions, ""]
    for title, columns, rows, note in sections(proof):
        cells = [columns, ["---"] * len(columns), *rows]
        lines += [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in cells), "", note, ""]
    return "\n".join([*lines, *mismatches(proof)]) + "\n"


def mismatches(proof: Proof) -> list[str]:
    """Return a Markdown list item for each text that differs from plain decoding."""
    return [f"- {', '.join(labels.values())}, {one}" for labels, p in proof.equal for one in p.mismatches]


def as_json(proof: Proof) -> dict:
    """Return the report as a dictionary of plain types for JSON."""
    return {
        "sound": proof.sound,
        **proof.bugs,
        "threshold": proof.threshold,
        "rollback": [labels | asdict(p) for labels, p in proof.rollback],
        "equal": [labels | {"same": p.same} | asdict(p) for labels, p in proof.equal],
        "laws": [labels | asdict(p) for labels, p in proof.laws],
        "exact": [labels | {"distance": distance} for labels, distance in proof.exact],
        "sampled": [labels | asdict(p) for labels, p in proof.sampled],
    }
