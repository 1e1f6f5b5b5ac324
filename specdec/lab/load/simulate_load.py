"""The command `specdec simulate load`: what each adaptive policy would make of recorded texts at any load."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.table import Table

from specdec.adaptive import Curve, Fixed, Policy
from specdec.calibrate import WIDTHS, assembled, first_rates, kept_curve, sizes_of
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import check_writable
from specdec.cli.flags import add_flags, command_parser, read_flags, whole_numbers
from specdec.cli.terminal import console
from specdec.lab.cost.gpu_round import counted_launches
from specdec.lab.cost.roofline import CONFIGS, HARDWARE, Roofline, decoder, eagle3_of
from specdec.lab.load.bench_serve import rates
from specdec.lab.load.loads import compare, compare_open
from specdec.lab.load.replayed import Drafts
from specdec.lab.output import write_json
from specdec.lab.replay import Superset, record
from specdec.lab.sweep.benchmarks import load_benchmark
from specdec.model_settings import ONE_PROCESS, ModelSettings
from specdec.trees import DynamicTree
from specdec.trees.spec import TreeSpec

SIMULATED = "SIMULATED: texts are recorded, rounds are counted, seconds are computed"
POLICIES = ("table", "ema", "survival:told", "survival:calibrated")


def parser() -> argparse.ArgumentParser:
    p = command_parser("simulate load", f"{SIMULATED}. docs/adaptive.md.", "--recording FOLDER [options]")
    texts = p.add_argument_group("texts")
    texts.add_argument(
        "--recording", type=Path, required=True, metavar="FOLDER", help="of specdec.lab.replay; made if absent"
    )
    texts.add_argument("--prompts", metavar="FILE", help="what is recorded: of MT-bench, of ShareGPT, or with `prompt`")
    texts.add_argument("--limit", type=int, default=40, help="prompts that are recorded (default 40)")
    texts.add_argument("--max-new-tokens", type=int, default=64, help="of a recorded text (default 64)")
    add_flags(p.add_argument_group("models, to record and to measure costs"), ModelSettings, *ONE_PROCESS)
    tree = p.add_argument_group("largest tree")
    tree.add_argument("--topk", type=int, default=1, help="(default 1: chains)")
    tree.add_argument("--steps", type=int, default=5, help="(default 5)")
    tree.add_argument("--num-draft-tokens", type=int, help="(default steps + 1, or 16)")
    load = p.add_argument_group("load")
    load.add_argument("--concurrency", type=whole_numbers, default=[1, 2, 4, 8, 16, 32], help="(default 1,2,4,... 32)")
    load.add_argument("--rate", type=rates, metavar="X,X,...", help="instead: requests a second, at random")
    load.add_argument("--rows", type=int, default=32, help="sequences decoded together at most (default 32)")
    load.add_argument("--requests", type=int, default=200, help="at each load (default 200)")
    cost = p.add_argument_group("costs: measured here, or by formulas")
    cost.add_argument("--hardware", choices=sorted(HARDWARE), help="formulas for this device, not measured")
    cost.add_argument("--shape", choices=sorted(CONFIGS), default="llama-3.1-8b", help="(default llama-3.1-8b)")
    cost.add_argument("--context", type=int, default=1024, help="tokens, for the formulas (default 1024)")
    out = p.add_argument_group("output")
    out.add_argument("--chart", type=Path, metavar="FILE", help="throughput against interactivity, PNG")
    out.add_argument("--out", type=Path, metavar="FILE", help="all figures, JSON")
    return p


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if min(args.limit, args.max_new_tokens, args.rows, args.requests, args.context, *args.concurrency) < 1:
        raise ValueError("--limit, --max-new-tokens, --concurrency, --rows, --requests and --context are 1 at least")
    spec = TreeSpec(args.topk, args.steps, args.num_draft_tokens)
    spec.build()
    tree = DynamicTree(spec.topk, spec.steps, spec.num_draft_tokens)
    for path in (args.chart, args.out):
        if path is not None:
            check_writable(path)
    pair = None
    if args.hardware is None or args.draft is not None or not args.recording.exists():
        models = read_flags(ModelSettings, args)
        models.check_pair()
        target = models.load_target()
        pair = target, models.load_drafter(target)
    drafts = Drafts(recording(args, pair, tree), tree)
    most = args.rows if args.rate else max(args.concurrency)
    curve = kept_curve(*pair, spec.build(), most) if args.hardware is None else formulas(args, tree, most)
    prior = first_rates(pair[1].acceptance if pair else None, tree, 0.0)
    policies = {"plain": partial(Fixed, 0)} | {f"fixed {k}": partial(Fixed, k) for k in range(1, tree.steps + 1)}
    policies |= {name: partial(assembled, name, lambda: curve, sizes_of(tree), prior) for name in POLICIES}
    report(args, drafts, policies, curve)


def recording(args: argparse.Namespace, pair: tuple | None, tree: DynamicTree) -> Superset:
    """Read where it is, else made and kept."""
    if args.recording.exists():
        return Superset.load(args.recording)
    if args.prompts is None:
        raise ValueError(f"{args.recording} is not there: give --prompts to record it")
    found = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=args.limit)
    prompts = [question.turns[0] for question in found.questions]
    made = record(*pair, prompts, topks=[tree.topk], steps=tree.steps, max_new_tokens=args.max_new_tokens)
    made.save(args.recording)
    return made


def formulas(args: argparse.Namespace, tree: DynamicTree, rows: int) -> Curve:
    """The cost curve of a device that is not there (`specdec.lab.cost.roofline`)."""
    dims = CONFIGS[args.shape]
    costs = Roofline(HARDWARE[args.hardware], decoder(*dims), eagle3_of(*dims[1:-1], 32000), counted_launches())
    return curve_of(costs, tree, rows, args.context)


def curve_of(costs: Roofline, tree: DynamicTree, rows: int, context: int) -> Curve:
    """A curve of these formulas. The target's forward and the rule are verification, all else is the rest."""
    numbers = sorted({min(2**i, rows) for i in range(rows.bit_length() + 1)})
    sizes = sizes_of(tree)
    widths = sorted({1, *sizes, *(n for n in WIDTHS if n < sizes[-1])})

    def parts(levels: int, nodes: int, batch: int) -> tuple[float, float]:
        spec = None if levels == 0 else TreeSpec(tree.topk, levels, nodes)
        seconds = {name: float(part.seconds) for name, part in costs.parts(spec, context, batch).items()}
        verify = seconds.pop("target") + seconds.pop("verification")
        return sum(seconds.values()) + costs.host, verify

    rest = {b: [parts(levels, nodes, b)[0] for levels, nodes in enumerate(sizes)] for b in numbers}
    verify = {b: {n: parts(0 if n == 1 else tree.steps, n, b)[1] for n in widths} for b in numbers}
    return Curve(numbers, rest, verify, simulated=True)


def report(args: argparse.Namespace, drafts: Drafts, policies: dict[str, Callable[[], Policy]], curve: Curve) -> None:
    if args.rate:
        rows = compare_open(drafts, policies, curve, args.rate, args.requests, args.rows)
    else:
        rows = compare(drafts, policies, curve, args.concurrency, args.requests)
    where = f"{args.shape} on {args.hardware}, formulas" if curve.simulated else "costs measured on this machine"
    print_rows(rows, where, args.rate is not None)
    if args.out is not None:
        write_json(args.out, {"note": SIMULATED, "costs": curve.entries(), "rows": rows})
    if args.chart is not None:
        from specdec.lab.load.chart import write_chart

        lines = {name: [row for row in rows if row["policy"] == name] for name in policies}
        write_chart(args.chart, lines, "SIMULATED")
    print(json.dumps({"note": SIMULATED, "simulated_costs": curve.simulated, "loads": len(rows) // len(policies)}))


def print_rows(rows: list[dict], where: str, opened: bool) -> None:
    """Regret: the share of the seconds that a clairvoyant choice would have saved, at most."""
    table = Table(title=f"{where}\n{SIMULATED}")
    named = ("TTFT ms", "TPOT ms") if opened else ("tau", "levels", "nodes", "regret")
    for column in ("load", "policy", "tokens/s", "of one", *named):
        table.add_column(column, justify="right")
    last = None
    for row in rows:
        load = f"{row['rate']:g}/s" if opened else str(row["concurrency"])
        told = (
            [f"{row['ttft_ms']['median']:.1f}", f"{row['tpot_ms']['median']:.1f}"]
            if opened
            else [f"{row['tau']:.2f}", f"{row['levels']:.1f}", f"{row['nodes']:.1f}", f"{row['regret']:.1%}"]
        )
        shown = load if load != last else ""
        table.add_row(shown, row["policy"], f"{row['tokens_per_second']:.0f}", f"{row['interactivity']:.1f}", *told)
        last = load
    console(120).print(table)


if __name__ == "__main__":
    main()
