"""What several rows cost beside one: products, launched rounds by part, and whole compiled rounds.

    python -m specdec.lab.bench.row_costs --draft demo/mtp --compile --out rows.json
    python -m specdec.lab.bench.row_costs --draft demo/mtp --token-map MAP --draft-dtype int8 --compile --out rows.json
    python -m specdec.lab.bench.row_costs --shape mobilellm_125m --out rows.json

Products are those of all matrices of the target, one after the other as a forward takes them, in the way that the
engine chooses and by `torch.mm`, each after some turns of the same: as in decoding, where the rounds before have read
the same weights. Rounds are those of chains of 1 to --steps levels behind --context tokens, launched and, with
--compile, compiled. Of launched ones the target's forward is told too; what is drawn from its logits is the rest of a
verification. With --shape target and drafter are random weights in that shape: they cost what trained ones cost.
Everything is told in single rows and plain rounds of the same run. All take turns, and medians count.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn

from specdec import registry
from specdec.cli.errors import one_sentence_errors
from specdec.cli.terminal import console
from specdec.contracts import Drafter
from specdec.engine.engine import Engine
from specdec.lab.bench.shapes import random_head, random_target
from specdec.lab.cost.rounds import TIMED, time_in_turn
from specdec.lab.machine import provenance
from specdec.lab.models import add_model_flags, check_counts, load_models
from specdec.lab.output import write_json
from specdec.machine import set_matmul_precision
from specdec.model.cpu_linear import linear
from specdec.model.loader import choose_dtype
from specdec.model.target import Target
from specdec.structs import Sampling
from specdec.trees.spec import TreeSpec

ROWS = (1, 2, 4, 8, 16)
WARM = 5  # turns, of which the last counts
NEW_TOKENS = 48  # of a decoding in compiled rounds


def in_turn(ways: Mapping[str, Callable[[], float | None]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each way. A way may tell its own seconds; else it is timed. The first turn warms up."""
    found = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            told = way()
            if turn:
                found[name].append(told or time.perf_counter() - start)
    return {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}


def seconds_warm(products: list[tuple[Callable, Tensor]], inputs: Mapping[int, Tensor]) -> float:
    """Seconds of all products with the inputs of their widths, once the weights lie where caches keep them."""
    for _ in range(WARM):
        start = time.perf_counter()
        for product, weight in products:
            product(inputs[weight.shape[1]])
    return time.perf_counter() - start


@torch.inference_mode()
def products(target: Target, repeats: int) -> dict[str, dict[int, float]]:
    """Milliseconds of all products of a forward, by way and rows."""
    weights = [module.weight for module in target.modules() if isinstance(module, nn.Linear)]
    makers = {"engine": linear, "torch.mm": lambda weight, bias: lambda x: torch.mm(x, weight.t())}
    ways = {}
    for name, make in makers.items():
        made = [(make(weight, None), weight) for weight in weights]
        for rows in ROWS:
            inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype) for w in weights}
            ways[name, rows] = lambda made=made, inputs=inputs: seconds_warm(made, inputs)
    found = in_turn(ways, repeats)
    return {name: {rows: found[name, rows] for rows in ROWS} for name in makers}


def launched(
    target: Target, drafter: Drafter, steps: int, text: list[int], repeats: int
) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """Milliseconds by part of plain rounds and of chains, by their levels; and of the target's forward in them."""
    trees = [TreeSpec(1, depth) for depth in range(1, steps + 1)]
    engines = {None: Engine(target, **TIMED)} | {t: Engine(target, drafter, t.build(), **TIMED) for t in trees}
    runs = [(tree, len(text), 1) for tree in engines]
    with forwards_of(target) as forwards:
        costs = time_in_turn(engines, runs, text, Sampling(), repeats)
    found = {cost.tree.steps if cost.tree else 0: {p: 1e3 * s for p, s in cost.seconds.items()} for cost in costs}
    return found, {depth: 1e3 * statistics.median(forwards[depth + 1]) for depth in found}


@contextmanager
def forwards_of(target: Target) -> Iterator[dict[int, list[float]]]:
    """Meanwhile seconds of every forward of the target but those of prompts, by its nodes."""
    found, starts = defaultdict(list), []

    def ends(module: nn.Module, tokens: tuple[Tensor], how: dict, made: object) -> None:
        seconds = time.perf_counter() - starts.pop()
        if not how.get("prefill"):
            found[tokens[0].shape[1]].append(seconds)

    hooks = (
        target.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter())),
        target.register_forward_hook(ends, with_kwargs=True),
    )
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def compiled(target: Target, drafter: Drafter, steps: int, text: list[int], repeats: int) -> dict[int, float]:
    """Milliseconds of whole rounds, plain (0) and of chains, by their levels."""
    trees = {depth: TreeSpec(1, depth).build() for depth in range(1, steps + 1)}
    engines = {0: Engine(target, compile=True)}
    engines |= {depth: Engine(target, drafter, tree, compile=True) for depth, tree in trees.items()}

    def seconds_a_round(engine: Engine) -> float:
        result = engine.generate([text], max_new_tokens=NEW_TOKENS, eos=frozenset())
        return result.decode_seconds / result.rows[0].trace.rounds

    return in_turn({depth: lambda e=engine: seconds_a_round(e) for depth, engine in engines.items()}, repeats)


def print_report(report: dict) -> None:
    table = Table("rows", *(f"products, {name}: ms, rows of one" for name in report["products_ms"]), box=None)
    for rows in ROWS:
        cells = [f"{ms[rows]:.3f}, {ms[rows] / ms[1]:.2f}" for ms in report["products_ms"].values()]
        table.add_row(str(rows), *cells)
    console().print(table)
    rounds, forward, whole = report["launched_ms"], report["forward_ms"], report["compiled_ms"]
    plain = sum(rounds[0].values())
    head = ("levels", "round", "draft", "verify", "its forward", "round, compiled")
    table = Table(*head, title="chains: ms, plain rounds of the same kind", box=None)
    for depth, parts in rounds.items():
        draft = parts.get("grow", 0.0) + parts.get("extend", 0.0)
        spent = sum(parts.values()), draft, parts["verify"], forward[depth]
        cells = [f"{ms:.2f}, {ms / plain:.2f}" for ms in spent]
        table.add_row(str(depth), *cells, f"{whole[depth]:.2f}, {whole[depth] / whole[0]:.2f}" if whole else "-")
    console().print(table)


def load(args: argparse.Namespace) -> tuple[Target, Drafter]:
    if args.shape is None:
        return load_models(args)
    set_matmul_precision(args.matmul_precision)
    device, shape = torch.device("cpu"), registry.settings("shape", args.shape)
    target = random_target(shape["config"], shape["name"], choose_dtype(args.dtype, shape["config"], device), device)
    return target, random_head(target, **shape["drafter"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser, "token_map", "draft_dtype")
    parser.add_argument("--shape", help="a name of conf/shape, in the place of a pair")
    parser.add_argument("--steps", type=int, default=7, help="levels of the deepest chain (default 7)")
    parser.add_argument("--context", type=int, default=64, help="random tokens before the rounds (default 64)")
    parser.add_argument("--repeats", type=int, default=9, help="turns (default 9)")
    parser.add_argument("--compile", action="store_true", help="time compiled rounds too, a chain of each depth")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    args = parser.parse_args()
    check_counts(args, "steps", "context", "repeats")
    return args


@one_sentence_errors
def main() -> None:
    args = arguments()
    target, drafter = load(args)  # not in inference mode: weights that are made in it have no version, and no packs
    text = torch.randint(target.vocab, (args.context,), generator=torch.Generator().manual_seed(0)).tolist()
    report = provenance(target.device) | {"settings": {name: str(value) for name, value in vars(args).items()}}
    report["products_ms"] = products(target, 5 * args.repeats)
    report["launched_ms"], report["forward_ms"] = launched(target, drafter, args.steps, text, args.repeats)
    report["compiled_ms"] = compiled(target, drafter, args.steps, text, args.repeats) if args.compile else None
    write_json(args.out, report)
    print_report(report)


if __name__ == "__main__":
    main()
