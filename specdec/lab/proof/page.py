"""What a proof says: as a Markdown page, as tables on the terminal, as JSON."""

from dataclasses import asdict
from math import isnan

from rich.table import Table

from specdec.cli.terminal import console
from specdec.lab.proof.equality import SLACK
from specdec.lab.proof.proof import Proof


def verdict_line(proof: Proof) -> str:
    unequal, statistical = proof.unequal(), proof.statistical_bugs()
    if proof.sound:
        ties = sum(p.ties for *_, p in proof.equal)
        return f"No bug found; {ties} numerical ties."
    return (
        f"NOT LOSSLESS: {unequal} texts differ for no numerical reason, in {proof.left_behind()} cases a rejected "
        f"draft left something in the caches, {statistical} statistical tests failed."
    )


def sections(proof: Proof) -> list[tuple[str, list[str], list[list[str]], str]]:
    """(title, columns, rows, note) of each part that has rows."""
    equal = [[*case, p.tokens, p.rounds, f"{p.same} of {p.texts}", p.ties, p.bugs] for *case, p in proof.equal]
    laws = [
        [*case, p.draws, f"{p.emitted:.2f}", p.impossible, f"{p.pvalue:.2g}", f"{p.distance:.4f}", f"{p.noise:.4f}"]
        for *case, p in proof.laws
    ]
    sampled = [
        [name, tree, p.tokens, p.outside, "too few" if isnan(p.pvalue) else f"{p.pvalue:.2g}"]
        for name, tree, p in proof.sampled
    ]
    rollback = [
        [how, p.cases, p.states, p.logits, p.rounded, p.astray, f"{p.largest:.1e}"] for how, p in proof.rollback
    ]
    exact = [[*case, f"{distance:.1e}"] for *case, distance in proof.exact]
    parts = [
        (
            "Text against plain decoding of the same seed, token for token",
            ["drafter", "tree", "sampling", "tokens", "rounds", "identical", "ties", "bugs"],
            equal,
            "Tie: the first differing token and plain decoding's are those of the two largest scores (logit / "
            "temperature + noise), which, in a finer dtype, lie within four times the largest rounding error there; or "
            f"the edge of a filter, moved by {SLACK:g}, decides between them.",
        ),
        (
            "What rejected drafts leave in the target's caches",
            ["rows", "cases", "other states", "other logits", "by rounding", "not the plain text's", "largest"],
            rollback,
            "The same tokens are accepted behind different rejected drafts: what is kept, and the next logits, must be "
            "the same bits. By rounding: experts, which compute tokens together. Largest: difference of a logit from "
            "the plain text's, as a share of their range.",
        ),
        (
            "Every lossless rule against the exact law of three tokens, on tables",
            ["rule", "tree", "sampling", "draws", "tokens a round", "impossible", "p", "TV", "TV of chance (99 %)"],
            laws,
            f"impossible: draws to which the law gives no probability. p: of a chi-square test; below "
            f"{proof.threshold:.1e} it is a bug ({len(laws) + len(sampled)} tests together). TV: total variation "
            "distance of the draws from the exact law. filtered: temperature 0.8, top-k, top-p.",
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
    for title, columns, rows, note in sections(proof):
        cells = [columns, ["---"] * len(columns), *rows]
        lines += [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in cells), "", note, ""]
    return "\n".join([*lines, *mismatches(proof)]) + "\n"


def mismatches(proof: Proof) -> list[str]:
    return [f"- {name}, {tree}, {how}, {mismatch}" for name, tree, how, p in proof.equal for mismatch in p.mismatches]


def print_proof(proof: Proof) -> None:
    screen = console(160)
    for title, columns, rows, note in sections(proof):
        out = Table(title=title, caption=note, title_justify="left", caption_justify="left")
        for column in columns:
            out.add_column(
                column, justify="left" if column in ("drafter", "tree", "rule", "sampling", "rows") else "right"
            )
        for row in rows:
            out.add_row(*row)
        screen.print(out)
    for line in mismatches(proof):
        screen.print(line)
    screen.print(verdict_line(proof))


def as_json(proof: Proof) -> dict:
    return {
        "sound": proof.sound,
        "unequal_texts": proof.unequal(),
        "statistical_bugs": proof.statistical_bugs(),
        "threshold": proof.threshold,
        "left_behind": proof.left_behind(),
        "rollback": [{"rows": how, **asdict(p)} for how, p in proof.rollback],
        "equal": [
            {"drafter": name, "tree": tree, "sampling": how, "same": p.same, **asdict(p)}
            for name, tree, how, p in proof.equal
        ],
        "laws": [{"rule": rule, "tree": tree, "sampling": how, **asdict(p)} for rule, tree, how, p in proof.laws],
        "exact": [{"rule": rule, "sampling": how, "distance": d} for rule, how, d in proof.exact],
        "sampled": [{"drafter": name, "tree": tree, **asdict(p)} for name, tree, p in proof.sampled],
    }
