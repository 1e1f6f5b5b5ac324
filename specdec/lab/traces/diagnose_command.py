"""Explain in words why acceptance is low.

    specdec trace diagnose TRACE --target TARGET --draft DRAFT

Reads a trace of `specdec generate --trace`: acceptance by depth and context, the draft vocabulary, and whether the
drafter's probabilities are right. Then tests whether the checkpoint drafts better when it is read another way, as
`specdec checkpoint check` does. Prints one line for each cause with what to do, the likely causes first.
"""

import argparse
import json
from collections.abc import Callable

from specdec.cli.parser import read_flags
from specdec.contracts import Drafter
from specdec.drafters.formats import check, verdict
from specdec.drafters.formats.prompts import PROMPTS
from specdec.engine.trace_files import read_trace
from specdec.lab.output import stage
from specdec.lab.traces.diagnose import by_context, calibration, coverage
from specdec.lab.traces.metrics import Rows, acceptance_by_depth, tau
from specdec.model_settings import ModelSettings

COVERED = 0.98  # of the target's tokens that a draft vocabulary should hold
LOW, HIGH = 0.6, 0.5  # acceptance of the first token below this is low, and of the last level above this is high
SHORTER = 0.8  # tau at long contexts, of that at short ones, below which the context matters
OFF = 0.15  # expected calibration error that is large
FEW = 200  # rounds of a bin of contexts that count
PROBED = 6  # prompts of the check of the checkpoint


def causes(rows: Rows, drafter: Drafter, decode: Callable[[int], str]) -> list[str]:
    """Return a sentence for each cause of low acceptance that a trace shows, with what to do."""
    found, shares = [], acceptance_by_depth(rows)
    known = coverage(rows, drafter, decode, most=5)
    if known["share"] is not None and known["share"] < COVERED:
        missed = ", ".join(repr(text) for text, _ in known["missed"])
        found.append(
            f"The draft vocabulary of {known['size']} tokens lacks {1 - known['share']:.1%} of the target's tokens, "
            f"such as {missed}: train with a larger drafter.draft_vocab_size, or decode with another --token-map."
        )
    bins = [one for one in by_context(rows, resamples=20) if one["rounds"] >= FEW]
    if len(bins) > 1 and bins[-1]["value"] < SHORTER * bins[0]["value"]:
        found.append(
            f"tau falls from {bins[0]['value']:.2f} to {bins[-1]['value']:.2f} beyond {bins[-1]['from']} tokens of "
            "context: train on longer conversations (data.max_length)."
        )
    error = calibration(rows)["error"]
    if error is not None and error > OFF:
        found.append(
            f"The drafter's probabilities are off by {error:.0%}, so a dynamic tree grows at the wrong places: use a "
            "chain or a static tree (specdec tune tree), or train longer."
        )
    if shares and shares[0] < LOW:
        found.append(
            f"The first drafted token is accepted in {shares[0]:.0%} of the rounds: the drafter does not know these "
            "texts. Train it further on the target's own answers to such prompts (`specdec data regenerate`, then "
            "`specdec train --from DRAFT`)."
        )
    elif len(shares) > 1 and shares[-1] > HIGH:
        found.append(f"{shares[-1]:.0%} of the rounds accept all {len(shares)} levels: draft deeper, --steps.")
    return found


def run(args: argparse.Namespace) -> None:
    """Run `specdec trace diagnose`."""
    rows = [row for folder in args.traces for row in read_trace(folder).rows]
    models = read_flags(ModelSettings, args)
    target = models.load_target()
    found = causes(rows, models.load_drafter(target), lambda token: target.tokenizer.decode([token]))
    if args.draft is not None and not args.draft.startswith("ngram"):
        stage(f"reading {args.draft} in other ways, on {PROBED} prompts")
        report = check.check(target, args.draft, PROMPTS[:PROBED], allow_nonfinite=args.allow_nonfinite)
        if report.better_reading is not None:
            found.insert(0, f"The checkpoint is read otherwise than it was trained. {verdict.verdict(report)}")
    found = found or ["Nothing stands out: a larger drafter, more data or longer training may help."]
    if args.json:
        print(json.dumps({"tau": tau(rows), "acceptance_by_depth": acceptance_by_depth(rows), "causes": found}))
        return
    shares = "  ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(acceptance_by_depth(rows), 1))
    print(f"tau {tau(rows):.2f}; rounds that accepted at least so many drafted tokens: {shares}")
    print("\n".join(f"- {sentence}" for sentence in found))
