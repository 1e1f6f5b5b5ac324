"""The fastest setting of a pair on this machine:  specdec tune --prompt-file questions.jsonl --out best.yaml

Measures what rounds cost (once for a machine and pair), replays what the drafter would have had accepted under every
setting, predicts tokens/s, decodes with the best few and plainly, and writes the fastest as a file for
`specdec generate --settings`. docs/tuning.md says how.
"""

import argparse
import json
import statistics
import sys
from dataclasses import fields
from pathlib import Path

from omegaconf import OmegaConf
from rich.table import Table

from specdec.api import ModelSettings
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import check_writable, write_text
from specdec.cli.flags import command_parser, read_flags, whole_numbers
from specdec.cli.lock import only_writer
from specdec.cli.settings import REPORT
from specdec.cli.terminal import console
from specdec.engine.recorder import versions
from specdec.lab.machine import machine
from specdec.lab.models import add_model_flags, add_prompt_flags, check_counts, load_models, read_encoded
from specdec.lab.output import progress_bar
from specdec.lab.tune import Tuned, tune
from specdec.structs import Sampling
from specdec.trees.record import answers_to, record
from specdec.trees.spec import parse_tree
from specdec.tuning.costs import Costs
from specdec.tuning.grid import NODES, WIDTHS, grid_costs, useful_trees

SHOWN = 10
BUSY = 0.1  # a median misfit of the cost model above this says that the machine did something else too


def parser() -> argparse.ArgumentParser:
    p = command_parser("tune", __doc__, "--prompt-file FILE --out FILE [options]")
    model = p.add_argument_group("models")
    add_model_flags(model, "token_map", "feedback")
    text = p.add_argument_group("what is decoded")
    add_prompt_flags(text, limit=16, max_new_tokens=64, settings=())
    text.add_argument("--batch-size", type=int, default=1, help="prompts decoded together (default 1)")
    tries = p.add_argument_group("what is tried")
    tries.add_argument("--topk", type=whole_numbers, default=list(WIDTHS), help="(default 1,2,4,8)")
    tries.add_argument("--steps", type=int, default=8, help="levels at most (default 8)")
    tries.add_argument(
        "--num-draft-tokens", type=whole_numbers, default=list(NODES), help="nodes (default 2,3,4,6,8,12,... 64)"
    )
    tries.add_argument(
        "--tree", action="append", default=[], help="a static tree to try too: its file, or a name; may be given again"
    )
    tries.add_argument("--tries", type=int, default=4, help="settings that are decoded with for real (default 4)")
    tries.add_argument("--repeats", type=int, default=3, help="of real decoding and measured rounds (default 3)")
    tries.add_argument("--remeasure", action="store_true", help="measure again instead of reading the cache")
    out = p.add_argument_group("output")
    out.add_argument("--out", type=Path, required=True, help="the settings file")
    out.add_argument("--json", action="store_true", help="the report as one JSON object in the last line")
    return p


def print_tables(tuned: Tuned, costs: Costs) -> None:
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
    prompts = read_encoded(target, args.prompt_file, args.limit, args.raw)
    topks = [topk for topk in args.topk if topk <= drafter.vocab.size]
    dynamic = useful_trees(topks, drafter.deepest(args.steps), args.num_draft_tokens)
    if not dynamic:
        raise ValueError("there is no setting with these topk, steps and num_draft_tokens: give more of them")
    trees, sampling = [*dynamic, *map(parse_tree, args.tree)], read_flags(Sampling, args)
    topks = sorted({tree.topk for tree in dynamic})
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
    how = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": args.seed}
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


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_counts(args, "limit", "max_new_tokens", "batch_size", "steps", "tries", "repeats")
    if args.max_new_tokens < 2:
        raise ValueError("--max-new-tokens must be at least 2: the first token comes from the prefill")
    read_flags(ModelSettings, args).check_pair()
    check_writable(args.out)
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
    print(json.dumps(report) if args.json else f"wrote {args.out}: specdec generate --settings {args.out}")


if __name__ == "__main__":
    main()
