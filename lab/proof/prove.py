"""The command `python -m lab.proof.prove`: what is tested, and the page that says what came of it."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import ClassVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from lab.proof.greedy import GreedyProof, GreedyProver
from lab.proof.laws import LawProof, exact_distance, prove_law, significance
from lab.proof.sampled import SampledProof, prove_sampled
from lab.sweep.compare import describe_tree
from specdec.api import DEMO_DRAFTER, DEMO_TARGET, load_drafter, load_target, make_tree
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import write_whole
from specdec.contracts import Drafter, TreePolicy
from specdec.text import encode_prompt, read_prompts
from specdec.types import DraftTree, Sampling, Verdict, Verifier
from specdec.verify import VERIFIERS, make_verifier
from trees import Chain, DynamicTree, SampledTree

DEMO_DRAFTERS = tuple(DEMO_DRAFTER.parent / name for name in ("eagle3", "eagle2", "mtp", "medusa"))
PROMPTS = ["What are the benefits of regular exercise?", "Write a short story about a dragon.", "What is a tree?"]
WARM, FILTERED = Sampling(1.0), Sampling(0.8, top_k=4, top_p=0.9)
NUCLEUS = Sampling(1.0, top_p=0.9)
LAW_TREES = (Chain(3), DynamicTree(3, 2, 8), SampledTree((1, 1, 1)), SampledTree((3, 2)), SampledTree((2, 1, 2)))


class OneInAThousand:
    """A broken rule, to see that the proof finds it: of a thousand emitted tokens one is a draft that was refused."""

    lossless: ClassVar[bool] = True

    def __init__(self, inner: Verifier, rate: float = 1e-3):
        self.inner, self.rate, self.owed = inner, rate, 0.0
        self.needs_q, self.chains_only = inner.needs_q, inner.chains_only
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, tree: DraftTree, logits: Tensor, sampling: Sampling, generator=None) -> Verdict:
        verdict = self.inner(tree, logits, sampling, generator)
        refused = verdict.n == 1  # the first drafts among them
        self.owed += self.rate * verdict.n.sum().item()
        chance = max(self.owed, 0.0) / max(refused.sum().item(), 1)
        wrong = refused & (torch.rand(len(refused), generator=self.generator) < chance).to(refused.device)
        self.owed -= wrong.sum().item()
        verdict.tokens[:, 0] = torch.where(wrong, tree.tokens[:, 1], verdict.tokens[:, 0])
        return verdict


@dataclass
class Proof:
    """Everything that was tested: what, with what, and what came of it."""

    greedy: list[tuple[str, str, GreedyProof]] = field(default_factory=list)  # drafter, tree
    laws: list[tuple[str, str, str, LawProof]] = field(default_factory=list)  # verifier, tree, sampling
    exact: list[tuple[str, str, float]] = field(default_factory=list)  # verifier, sampling, total variation
    sampled: list[tuple[str, str, SampledProof]] = field(default_factory=list)  # drafter, tree

    @property
    def threshold(self) -> float:
        return significance(len(self.laws) + len(self.sampled))

    def greedy_bugs(self) -> int:
        return sum(proof.bugs for *_, proof in self.greedy)

    def statistical_bugs(self) -> int:
        """Tests that no accident explains."""
        return (
            sum(law.pvalue < self.threshold for *_, law in self.laws)
            + sum(s.outside > 0 or s.pvalue < self.threshold for *_, s in self.sampled)
            + sum(distance > 1e-6 for *_, distance in self.exact)
        )

    @property
    def sound(self) -> bool:
        return not self.greedy_bugs() and not self.statistical_bugs()


def fits(verifier: Verifier, tree: TreePolicy) -> bool:
    return (tree.samples or not verifier.needs_q) and (tree.topk == 1 or not verifier.chains_only)


def trees_for(drafter: Drafter) -> list[TreePolicy]:
    depth = min(5, drafter.max_steps or 5)
    return [make_tree(4, depth), Chain(depth)]


def prove(target, drafters: dict[str, Drafter], prompts: list[list[int]], args: argparse.Namespace) -> Proof:
    """Run all tests; `args` has max_new_tokens, draws, and self_test."""
    proof = Proof()

    def rule(name: str) -> Verifier:
        verifier = make_verifier(name)
        return OneInAThousand(verifier) if args.self_test else verifier

    names = [name for name, kind in VERIFIERS.items() if make_verifier(name).lossless]
    cases = [(name, tree) for name in names for tree in LAW_TREES if fits(make_verifier(name), tree)]
    pairs = [(name, tree) for name, drafter in drafters.items() for tree in trees_for(drafter)]
    bar = tqdm(total=2 * len(cases) + 2 * len(pairs) + 1, desc="proving", leave=False)
    for name, tree in cases:
        for how, sampling in (("temperature 1", WARM), ("filtered", FILTERED)):
            proof.laws.append((name, describe_tree(tree), how, prove_law(tree, rule(name), sampling, args.draws)))
            bar.update()
    for how, sampling in (("temperature 1", WARM), ("filtered", FILTERED)):
        if not args.self_test:  # a rule with chances of its own has no law to enumerate
            proof.exact.append(("match", how, exact_distance(rule("match"), sampling)))
    prover = GreedyProver(target, prompts, args.max_new_tokens)
    bar.update()
    for name, tree in pairs:
        proof.greedy.append((name, describe_tree(tree), prover.prove(drafters[name], tree, rule("match"))))
        bar.update()
        sampled = prove_sampled(
            target, drafters[name], tree, rule("match"), prompts, NUCLEUS, args.max_new_tokens, args.seed
        )
        proof.sampled.append((name, describe_tree(tree), sampled))
        bar.update()
    bar.close()
    return proof


def verdict_line(proof: Proof) -> str:
    greedy, statistical = proof.greedy_bugs(), proof.statistical_bugs()
    if proof.sound:
        ties = sum(p.ties for *_, p in proof.greedy)
        return f"No bug found; {ties} numerical ties."
    return (
        f"NOT LOSSLESS: {greedy} greedy texts differ for no numerical reason, {statistical} statistical tests failed."
    )


def tables(proof: Proof) -> list[tuple[str, list[str], list[list[str]], str]]:
    """(title, columns, rows, what they mean) of each part."""
    greedy = [
        [name, tree, p.tokens, p.rounds, f"{p.same} of {p.texts}", p.ties, p.bugs] for name, tree, p in proof.greedy
    ]
    laws = [
        [*case, p.draws, f"{p.emitted:.2f}", p.impossible, f"{p.pvalue:.2g}", f"{p.distance:.4f}", f"{p.noise:.4f}"]
        for *case, p in proof.laws
    ]
    sampled = [
        [name, tree, p.tokens, p.outside, "too few" if isnan(p.pvalue) else f"{p.pvalue:.2g}"]
        for name, tree, p in proof.sampled
    ]
    exact = [[*case, f"{distance:.1e}"] for *case, distance in proof.exact]
    parts = [
        (
            "Greedy text against plain decoding",
            ["drafter", "tree", "tokens", "rounds", "identical", "ties", "bugs"],
            greedy,
            "Tie: the first differing token and plain decoding's are the target's two likeliest, and their logits, in "
            "a finer dtype, lie within four times its largest rounding error there.",
        ),
        (
            "Every lossless rule against the exact law of three tokens, on tables",
            ["rule", "tree", "sampling", "draws", "tokens a round", "impossible", "p", "TV", "TV of chance (99 %)"],
            laws,
            f"p: chi-square; below {proof.threshold:.1e} it is a bug ({len(laws) + len(sampled)} tests together).",
        ),
        (
            "By enumeration, without sampling",
            ["rule", "sampling", "TV from the target"],
            exact,
            "The law of two tokens, over all outcomes of the draws at a tree's nodes; `match` has no other chance.",
        ),
        (
            "Sampled text of the pair, top-p 0.9",
            ["drafter", "tree", "tokens", "outside the filter", "p"],
            sampled,
            "p: are the tokens' places in the target's own distributions, given the text before them, uniform?",
        ),
    ]
    return [
        (title, columns, [[str(cell) for cell in row] for row in rows], note)
        for title, columns, rows, note in parts
        if rows
    ]


def markdown(proof: Proof, told: str) -> str:
    lines = ["# Is it lossless?", "", f"**{verdict_line(proof)}**", "", told, ""]
    for title, columns, rows, note in tables(proof):
        cells = [columns, ["---"] * len(columns), *rows]
        lines += [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in cells), "", note, ""]
    return "\n".join([*lines, *mismatches(proof)]) + "\n"


def mismatches(proof: Proof) -> list[str]:
    return [
        f"- {name}, {tree}, prompt {m.prompt}, token {m.position}: {m.plain} became {m.speculative}; margin "
        f"{m.margin:.1e}, rounding error {m.error:.1e}: {'a tie' if m.tie else 'a BUG'}"
        for name, tree, p in proof.greedy
        for m in p.mismatches
    ]


def show(proof: Proof) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    for title, columns, rows, note in tables(proof):
        out = Table(title=title, caption=note, title_justify="left", caption_justify="left")
        for column in columns:
            out.add_column(column, justify="left" if column in ("drafter", "tree", "rule", "sampling") else "right")
        for row in rows:
            out.add_row(*row)
        console.print(out)
    for line in mismatches(proof):
        console.print(line)
    console.print(verdict_line(proof))


def as_json(proof: Proof) -> dict:
    return {
        "sound": proof.sound,
        "greedy_bugs": proof.greedy_bugs(),
        "statistical_bugs": proof.statistical_bugs(),
        "threshold": proof.threshold,
        "greedy": [{"drafter": name, "tree": tree, **asdict(p)} for name, tree, p in proof.greedy],
        "laws": [{"rule": rule, "tree": tree, "sampling": how, **asdict(p)} for rule, tree, how, p in proof.laws],
        "exact": [{"rule": rule, "sampling": how, "distance": d} for rule, how, d in proof.exact],
        "sampled": [{"drafter": name, "tree": tree, **asdict(p)} for name, tree, p in proof.sampled],
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m lab.proof.prove", description="Is speculative decoding lossless here?")
    p.add_argument("--target", help="folder or hub name (default: the bundled demo)")
    p.add_argument("--draft", nargs="+", help="drafters, as of specdec.generate; default: all bundled ones and n-grams")
    p.add_argument("--prompt-file", type=Path, help="as of specdec.generate; default: three questions")
    p.add_argument("--limit", type=int, help="only so many prompts")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--draws", type=int, default=100_000, help="of three tokens, for each rule, tree and sampling")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, help="write the page here, as Markdown")
    p.add_argument("--json", action="store_true", help="one JSON object as the last line, instead of the tables")
    p.add_argument("--self-test", action="store_true", help="break the rules, one token in 1,000: is it found?")
    return p


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    for name in ("max_new_tokens", "draws", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.target is not None and args.draft is None:
        raise ValueError("a target of your own needs its drafters: give --draft")
    if args.out is not None and not args.out.parent.is_dir():
        raise ValueError(f"there is no folder {args.out.parent} for the page")
    target = load_target(args.target or DEMO_TARGET, dtype=args.dtype, device=args.device)
    drafts = args.draft or [*DEMO_DRAFTERS, "ngram", "ngram:suffix"]
    drafters = {Path(str(draft)).name: load_drafter(draft, target) for draft in drafts}
    questions = read_prompts(args.prompt_file) if args.prompt_file else PROMPTS
    prompts = [encode_prompt(target, question) for question in questions[: args.limit]]
    proof = prove(target, drafters, prompts, args)
    dtype = str(target.dtype).removeprefix("torch.")
    told = f"Target {target.name}, {dtype}; {len(prompts)} prompts, {args.max_new_tokens} tokens; seed {args.seed}."
    if args.out is not None:
        write_whole(args.out, lambda aside: aside.write_text(markdown(proof, told), encoding="utf-8"))
    if args.json:
        print(json.dumps(as_json(proof)))
    else:
        show(proof)
    if proof.sound == args.self_test:
        sys.exit(1)
