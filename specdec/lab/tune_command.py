"""Find the fastest setting of a target and a drafter on this machine.

    specdec tune --prompts questions.jsonl --out best.yaml

Measures what rounds cost (once for a machine and pair), replays what the drafter would have had accepted under every
setting, predicts tokens/s, decodes with the best few and plainly, and writes the fastest as a file for `specdec
generate --settings`. docs/tuning.md says how.
"""

import argparse
import json
import shlex
import statistics
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.table import Table

from specdec.cli.files import write_text
from specdec.cli.lock import only_writer
from specdec.cli.parser import read_flags
from specdec.cli.settings import REPORT
from specdec.cli.terminal import console
from specdec.engine.recorder import versions
from specdec.lab.machine import machine
from specdec.lab.models import load_models, read_encoded
from specdec.lab.output import progress_bar, stage
from specdec.lab.tune import Tuned, tune
from specdec.structs import Sampling
from specdec.trees.record import answers_to, record
from specdec.trees.spec import parse_tree
from specdec.tuning.costs import Costs
from specdec.tuning.grid import grid_costs, useful_trees

SHOWN = 10
BUSY = 0.1  # a median misfit of the cost model above this says that the machine did something else too


def print_tables(tuned: Tuned, costs: Costs) -> None:
    """Print the best predicted settings, and predicted next to measured speeds."""
    ranking = Table("topk/steps/nodes", "tokens/s", "to plain", "tau", "ms a round", title="predicted")
    for p in tuned.ranking[:SHOWN]:
        ratio = p.tokens_per_second / tuned.plain.tokens_per_second
        cells = f"{p.tokens_per_second:.1f}", f"{ratio:.2f}", f"{p.tau:.2f}", f"{1e3 * p.seconds_a_round:.2f}"
        ranking.add_row(str(p.tree), *cells)
    ranking.caption = (
        f"the best {min(SHOWN, len(tuned.ranking))} of {len(tuned.ranking)}; the functions fit the measured rounds "
        f"within {statistics.median(costs.errors()):.1%} at the median"
    )
    if tuned.bound is not None:
        ranking.caption += f"; knowing the texts, the best tree for every round would reach {tuned.bound:.1f} tokens/s"
    real = Table("", "predicted", "measured", "predicted to measured", "tau", title="tokens/s for real")
    for p, m in tuned.measured:
        name = "plain" if p.tree is None else str(p.tree)
        rates = p.tokens_per_second, m.tokens_per_second
        real.add_row(name, f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{rates[0] / rates[1]:.2f}", f"{m.tau:.2f}")
    console(120).print(ranking, real)


def model_entries(args: argparse.Namespace) -> dict:
    """The models as a settings file names them: what is on disk by its absolute path."""

    def place(name) -> str | None:
        return str(Path(name).resolve()) if name is not None and Path(name).exists() else name and str(name)

    entries = {key: place(getattr(args, key)) for key in ("target", "draft", "token_map")}
    defaults = {"dtype": "auto", "matmul_precision": None, "device": "cpu"}
    entries |= {key: None if getattr(args, key) == usual else getattr(args, key) for key, usual in defaults.items()}
    return entries | {"feedback": args.feedback}


def find(args: argparse.Namespace, target, drafter) -> tuple[Costs, Tuned]:
    """Measure, replay, predict, try. Raises ValueError if there is no tree to predict but those of --tree."""
    prompts = read_encoded(target, args.prompts, args.limit, args.raw)
    topks = [topk for topk in args.topk if topk <= drafter.vocab.size]
    dynamic = useful_trees(topks, drafter.deepest(args.steps), args.num_draft_tokens)
    if not dynamic:
        raise ValueError("there is no setting with these topk, steps and num_draft_tokens: give more of them")
    trees, sampling = [*dynamic, *map(parse_tree, args.tree or ())], read_flags(Sampling, args)
    topks = sorted({tree.topk for tree in dynamic})
    stage("reading or measuring what rounds cost on this machine")
    costs = grid_costs(
        target,
        drafter,
        remeasure=args.remeasure,
        progress=progress_bar("costs"),
        topks=topks,
        steps=max(tree.steps for tree in dynamic),
        nodes=args.num_draft_tokens,
        statics=[tree for tree in trees if tree.fixed],
        batches=sorted({min(args.batch_size, len(prompts)), len(prompts) % args.batch_size or args.batch_size}),
        sampling=sampling,
        repeats=args.repeats,
    )
    how: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": args.seed}
    stage(f"decoding {len(prompts)} prompts without a drafter, and drafting along the answers")
    texts, steps = answers_to(target, prompts, **how), max(tree.steps for tree in trees)
    recording = record(target, drafter, texts, steps=steps, topks=topks, sampling=sampling)
    how |= {"batch": args.batch_size, "repeats": args.repeats, "progress": progress_bar("real runs")}
    return costs, tune(costs, recording, trees, target, drafter, prompts, tries=args.tries, **how)


def write(args: argparse.Namespace, tuned: Tuned, target) -> dict:
    """Write the file for `specdec generate --settings`, without entries that are None; returns its report."""
    recorded = ("max_new_tokens", "batch_size", *(f.name for f in fields(Sampling)))
    report = tuned.report() | {
        "tuned_for": {"prompts": len(tuned.measured[0][1].texts)} | {name: getattr(args, name) for name in recorded},
        "machine": machine(target.device),
        "versions": versions(),
    }
    tree, entries = tuned.best[0].tree, model_entries(args)
    if tree is None:
        entries = {key: entries[key] for key in ("target", "dtype", "matmul_precision", "device")} | {"no_draft": True}
    else:
        entries |= {"verifier": "match"} | tree.entries()  # the rule that replay knows, and the engine's own
    entries = {name: value for name, value in entries.items() if value is not None}
    entries[REPORT] = json.loads(json.dumps(report))  # plain types: versions are of a type of their own
    text = OmegaConf.to_yaml(OmegaConf.create(entries))
    write_text(args.out, f"# Written by specdec tune; the report is not read.\n{text}")
    return report


def run(args: argparse.Namespace) -> None:
    """Run `specdec tune`."""
    with only_writer(args.out):
        target, drafter = load_models(args)
        costs, tuned = find(args, target, drafter)
        try:
            report = write(args, tuned, target)
        finally:  # measurements are shown even if they cannot be written, and written even if standard output is closed
            print_tables(tuned, costs)
    if (misfit := statistics.median(costs.errors())) > BUSY:
        print(
            f"note: the measured rounds scatter by {misfit:.0%}: the machine was busy, and predictions are rough; "
            "run again with --remeasure when it is idle",
            file=sys.stderr,
        )
    print(tuned.verdict)
    hint = shlex.join(["specdec", "generate", "--settings", str(args.out)])
    print(json.dumps(report) if args.json else f"wrote {args.out}: {hint}")
