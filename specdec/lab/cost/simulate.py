"""The speed-up of speculative decoding on hardware that is given by numbers. A simulation, not a measurement.

    specdec simulate --hardware h100 --target llama-3.1-8b --out h100.png

Times come from a roofline (`lab.cost.roofline`), whose launches are counted (`lab.cost.gpu_round`). tau comes from
acceptance by rank, taken as equal at every depth, and from the best tree of N nodes for it (`specdec.trees.optimal`).
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from specdec.cli.errors import one_sentence_errors
from specdec.cli.flags import command_parser, whole_numbers
from specdec.cli.terminal import console
from specdec.lab.cost.gpu_round import counted_launches
from specdec.lab.cost.roofline import CONFIGS, HARDWARE, ForwardShape, Hardware, Roofline, decoder, eagle3_of
from specdec.lab.cost.rounds import NODES, WIDTHS, useful_trees
from specdec.lab.output import write_figure
from specdec.model.archs import read_config
from specdec.model.checkpoint import read_json
from specdec.model.names import resolve
from specdec.trees.optimal import expected_tau, most_nodes, optimal_paths
from specdec.trees.spec import TreeSpec

SIMULATED = "SIMULATED: formulas and assumed numbers, no measurement"


def tau_of(tree: TreeSpec, accept: Sequence[float]) -> float:
    """Tokens a round on average, if at every depth the child of rank r is right with probability accept[r]."""
    ranks = list(accept[: tree.topk])
    table = [ranks] * tree.steps
    nodes = min(tree.num_draft_tokens, most_nodes(len(ranks), tree.steps))
    return expected_tau(optimal_paths(table, nodes), table)


def speed_up(costs: Roofline, tree: TreeSpec, tau: float, context: float, batch: float) -> float:
    """Tokens/s of rounds that emit tau tokens, to plain decoding's."""
    return tau * float(costs.plain(context, batch)) / float(costs.round(tree, context, batch))


def best_by_load(
    costs: Roofline, taus: dict[TreeSpec, float], batches: Sequence[int], contexts: Sequence[int]
) -> list[dict]:
    """A row for each batch size and context: the best tree and what it gains, or that the memory is too small."""
    found = []
    for batch, context in itertools.product(batches, contexts):
        row = {"simulated": True, "batch": batch, "context": context, "fits": costs.fits(context, batch)}
        if row["fits"]:
            gains = {s: speed_up(costs, s, tau, context, batch) for s, tau in taus.items()}
            best = max(gains, key=gains.get)
            plain = float(costs.plain(context, batch))
            row |= {
                "setting": str(best),
                "tau": taus[best],
                "plain_ms": 1e3 * plain,
                "round_ms": 1e3 * float(costs.round(best, context, batch)),
                "plain_tokens_per_second": batch / plain,
                "speed_up": gains[best],
            }
        found.append(row)
    return found


def print_best(rows: list[dict], name: str) -> None:
    table = Table(title=f"{name}\n{SIMULATED}")
    for column in ("batch", "context", "best topk/steps/nodes", "tau", "ms plain", "ms a round", "plain tokens/s",
                   "speed-up"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        at = str(row["batch"]), str(row["context"])
        if not row["fits"]:
            table.add_row(*at, "does not fit", *[""] * 5)
            continue
        advice = f"{row['speed_up']:.2f}" + ("" if row["speed_up"] > 1 else " (decode plainly)")
        table.add_row(*at, row["setting"], f"{row['tau']:.2f}", f"{row['plain_ms']:.2f}", f"{row['round_ms']:.2f}",
                      f"{row['plain_tokens_per_second']:.0f}", advice)  # fmt: skip
    console(120).print(table)


def write_plot(
    costs: Roofline,
    taus: dict[TreeSpec, float],
    batches: Sequence[int],
    contexts: Sequence[int],
    nodes: Sequence[int],
    name: str,
    path: Path,
) -> None:
    """Draw the speed-up over batch size, over context, and over N. Every point is that of the best tree there."""
    from specdec.lab.figure_style import subplots

    def best(context: float, batch: float, nodes: int | None = None) -> float:
        if not costs.fits(context, batch):
            return np.nan
        some = ((s, tau) for s, tau in taus.items() if nodes in (None, s.num_draft_tokens))
        return max(speed_up(costs, s, tau, context, batch) for s, tau in some)

    nodes = [n for n in nodes if any(s.num_draft_tokens == n for s in taus)]
    few_contexts, few_batches = contexts[:: max(1, len(contexts) // 3)], batches[:: max(1, len(batches) // 4)]
    figure, axes = subplots(1, 3, figsize=(15, 4.5))
    figure.suptitle(f"{name}\n{SIMULATED}")
    lines = (
        ("batch size", batches, "context", few_contexts, lambda x, c: best(c, x)),
        ("context, tokens", contexts, "batch", few_batches, lambda x, b: best(x, b)),
        ("N, nodes verified", nodes, "batch", few_batches, lambda x, b: best(contexts[0], b, x)),
    )
    for axis, (label, xs, kind, each, value) in zip(axes, lines, strict=True):
        for of in each:
            axis.plot(xs, [value(x, of) for x in xs], marker=".", label=f"{kind} {of}")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlabel(label)
        axis.set_ylabel("speed-up over plain decoding")
        axis.text(0.5, 0.5, "SIMULATED", transform=axis.transAxes, fontsize=28, color="grey", alpha=0.25,
                  ha="center", va="center", rotation=25)  # fmt: skip
        axis.legend()
    axes[2].set_title(f"context {contexts[0]}")
    write_figure(path, figure)


def numbers(text: str) -> list[float]:
    """'0.7,0.1' -> [0.7, 0.1], all positive."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"wants numbers with commas between them, and not {text!r}") from None
    if min(found) <= 0:
        raise argparse.ArgumentTypeError(f"wants positive numbers, got {min(found):g}")
    return found


def parser() -> argparse.ArgumentParser:
    p = command_parser("simulate", f"{SIMULATED}.", "(--hardware NAME | --bandwidth X --flops X) [options]")
    hard = p.add_argument_group("hardware: peaks")
    hard.add_argument("--hardware", choices=sorted(HARDWARE), help="a preset, which the numbers below override")
    hard.add_argument("--bandwidth", type=float, help="GB/s")
    hard.add_argument("--flops", type=float, help="TFLOP/s, dense, in the dtype of the weights")
    hard.add_argument("--memory", type=float, help="GB")
    hard.add_argument("--launch", type=float, help="microseconds a kernel takes at least (default 2: CUDA graphs)")
    hard.add_argument("--bandwidth-share", type=float, help="of the peak that is reached (default 0.8)")
    hard.add_argument("--flops-share", type=float, help="of the peak that is reached (default 0.6)")
    pair = p.add_argument_group("pair")
    pair.add_argument(
        "--target", default="llama-3.1-8b", help=f"{', '.join(CONFIGS)}, or a folder or hub name with a config.json"
    )
    pair.add_argument("--target-bytes", type=float, help="GB of weights that a forward reads, instead of the config's")
    pair.add_argument("--bytes-each", type=float, default=2.0, help="bytes a weight and a cache element take")
    pair.add_argument("--draft-vocab", type=int, default=32000, help="of an EAGLE-3 head of the target's width")
    pair.add_argument(
        "--accept",
        type=numbers,
        metavar="X,X,...",
        default=[0.7, 0.12, 0.06, 0.03, 0.02, 0.01, 0.01, 0.01],
        help="how often the child of rank 1, 2, ... is right; default: near the bundled EAGLE-3 head's",
    )
    swept = p.add_argument_group("what is swept")
    swept.add_argument("--batch", type=whole_numbers, default=[2**i for i in range(8)], help="(default 1,2,4,... 128)")
    swept.add_argument(
        "--context", type=whole_numbers, default=[512, 2048, 8192, 32768], help="tokens (default 512,... 32768)"
    )
    swept.add_argument("--topk", type=whole_numbers, default=list(WIDTHS), help="(default 1,2,4,8)")
    swept.add_argument("--steps", type=int, default=8, help="levels at most (default 8)")
    swept.add_argument(
        "--num-draft-tokens", type=whole_numbers, default=list(NODES), help="nodes (default 2,3,4,6,8,12,... 64)"
    )
    out = p.add_argument_group("output")
    out.add_argument("--out", type=Path, help="a chart, PNG")
    out.add_argument("--json", action="store_true", help="everything as one JSON object in the last line")
    return p


def hardware_of(args: argparse.Namespace) -> Hardware:
    units = {"bandwidth": 1e9, "flops": 1e12, "memory": 1e9, "launch": 1e-6, "bandwidth_share": 1, "flops_share": 1}
    given = {name: getattr(args, name) * unit for name, unit in units.items() if getattr(args, name) is not None}
    for name, value in given.items():
        if value <= 0 or (name.endswith("share") and value > 1):
            limit = "lie in (0, 1]" if name.endswith("share") else "be positive"
            raise ValueError(f"--{name.replace('_', '-')} must {limit}, got {getattr(args, name):g}")
    if args.hardware is not None:
        return replace(HARDWARE[args.hardware], **given)
    missing = [name for name in ("bandwidth", "flops") if name not in given]
    if missing:
        raise ValueError(f"give --hardware ({', '.join(HARDWARE)}), or --{missing[0]} too")
    return Hardware(**{"memory": float("inf")} | given)


def shapes_of(args: argparse.Namespace) -> tuple[ForwardShape, ForwardShape]:
    """The shapes of target and drafter. Raises ValueError for sizes that are not positive."""
    dims = CONFIGS.get(args.target)
    if dims is None:
        c = read_config(read_json(resolve(args.target) / "config.json"), args.target)
        dims = (c.layers, c.hidden, c.intermediate, c.heads, c.kv_heads, c.head_dim, c.vocab)
    if args.bytes_each <= 0 or args.draft_vocab < 1:
        raise ValueError("--bytes-each and --draft-vocab must be positive")
    shapes = decoder(*dims), eagle3_of(*dims[1:-1], min(args.draft_vocab, dims[-1]))
    target, drafter = (replace(shape, bytes_each=args.bytes_each) for shape in shapes)
    if args.target_bytes is not None:
        if args.target_bytes <= 0:
            raise ValueError(f"--target-bytes must be positive, got {args.target_bytes:g}")
        target = replace(target, weights=args.target_bytes * 1e9 / args.bytes_each)
    return target, drafter


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if sum(args.accept) > 1:
        raise ValueError(f"--accept are the chances of different tokens: their sum {sum(args.accept):g} exceeds 1")
    if args.steps < 1 or min(args.topk + args.batch + args.context) < 1:
        raise ValueError("--steps, --topk, --batch and --context must be at least 1")
    topks = [k for k in args.topk if k <= len(args.accept)]
    trees = useful_trees(topks, args.steps, args.num_draft_tokens)
    if not trees:
        raise ValueError("there is no setting with these --topk, --steps, --num-draft-tokens and ranks of --accept")
    costs = Roofline(hardware_of(args), *shapes_of(args), counted_launches())
    taus = {tree: tau_of(tree, args.accept) for tree in trees}
    rows = best_by_load(costs, taus, args.batch, args.context)
    name = f"{args.target} on {args.hardware or 'the given hardware'}, acceptance {args.accept[0]:g} at rank 1"
    print_best(rows, name)
    if args.out is not None:
        write_plot(costs, taus, args.batch, args.context, args.num_draft_tokens, name, args.out)
    if args.json:
        print(json.dumps({"note": SIMULATED, "assumed": asdict(costs), "accept": args.accept, "rows": rows}))


if __name__ == "__main__":
    main()
