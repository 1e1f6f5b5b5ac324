"""Is what `--tree auto` chooses never slower than plain decoding, and nearly the best there is?

    python scripts/auto_check.py --draft demo/mtp --prompt-file questions.jsonl --out check.json

For every temperature and batch size a tree is chosen anew, as `specdec generate --recalibrate` does. Then the prompts
are decoded with it, plainly, and with 24 other trees, in turn. Plain decoding takes its turns twice: what its twin does
to it tells how exact the other figures are. Prints a table and writes JSON. The last line is one JSON object. Ends with
1 if a choice is more than 3 % slower than plain decoding, or more than 5 % slower than the best.
"""

import argparse
import json
import sys
from pathlib import Path

import checkout  # noqa: F401
from rich.table import Table
from tune_check import TREES

from specdec.auto import Choice, choose_tree
from specdec.cli.errors import one_sentence_errors
from specdec.cli.terminal import console
from specdec.engine.fits import most_steps
from specdec.engine.recorder import versions
from specdec.lab.cost.tune import measure_rates
from specdec.lab.machine import machine
from specdec.lab.models import add_model_flags, check_counts, load_models, read_encoded
from specdec.lab.output import progress_bar, write_json
from specdec.structs import Sampling
from specdec.trees.spec import TreeSpec

SLOWER_THAN_PLAIN, SLOWER_THAN_BEST = 0.97, 0.95


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(p)
    p.add_argument("--prompt-file", type=Path, required=True)
    p.add_argument("--limit", type=int, default=16, help="prompts (default 16)")
    p.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    p.add_argument("--raw", action="store_true", help="do not apply the chat template")
    p.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="(default 0 1)")
    p.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16], help="(default 1 4 16)")
    p.add_argument("--repeats", type=int, default=3, help="(default 3)")
    p.add_argument("--out", type=Path, required=True, help="JSON")
    return p


def fitting(drafter) -> list[TreeSpec]:
    """Of the 24 those that this drafter can draft."""
    deep = most_steps(drafter) or 99
    return [tree for tree in TREES if tree.steps <= deep and tree.topk <= drafter.vocab.size]


def row_of(choice: Choice, rates: dict[TreeSpec | None, float], twin: float, **where) -> dict:
    """What a choice did beside what could have been done. twin: plain decoding's rate once more."""
    others = {tree: rate for tree, rate in rates.items() if tree in (None, *TREES)}
    best = max(others, key=others.get)
    return where | {
        "chosen": "plain" if choice.tree is None else str(choice.tree),
        "expected_to_plain": choice.speedup,
        "to_plain": rates[choice.tree] / rates[None],
        "best": "plain" if best is None else str(best),
        "to_best": rates[choice.tree] / others[best],
        "twin_to_plain": twin / rates[None],
        "busy": choice.busy,
    }


def print_table(rows: list[dict]) -> None:
    head = ("temperature", "rows", "chosen", "expected to plain", "to plain", "best of the others", "to that", "twin")
    table = Table(*head)
    for row in rows:
        numbers = [f"{row[name]:.2f}" for name in ("expected_to_plain", "to_plain", "to_best", "twin_to_plain")]
        where = str(row["temperature"]), str(row["batch_size"])
        table.add_row(*where, row["chosen"], *numbers[:2], row["best"], *numbers[2:])
    console(120).print(table)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_counts(args, "limit", "max_new_tokens", "repeats")
    target, drafter = load_models(args)
    prompts, rows = read_encoded(target, args.prompt_file, args.limit, args.raw), []
    for temperature in args.temperature:
        for batch in args.batch_size:
            choice = choose_tree(target, drafter, batch=batch, temperature=temperature, recalibrate=True)
            tried = list(dict.fromkeys([None, choice.tree, *fitting(drafter)]))
            how = {"max_new_tokens": args.max_new_tokens, "repeats": args.repeats, "sampling": Sampling(temperature)}
            bar = progress_bar(f"temperature {temperature:g}, {batch} rows")
            *found, twin = measure_rates(target, drafter, prompts, [*tried, None], batch=batch, progress=bar, **how)
            rates = {m.tree: m.tokens_per_second for m in found}
            rows.append(row_of(choice, rates, twin.tokens_per_second, temperature=temperature, batch_size=batch))
            write_json(args.out, {"rows": rows, "machine": machine(target.device), "versions": versions()})
    print_table(rows)
    least = {name: min(row[name] for row in rows) for name in ("to_plain", "to_best")}
    passed = least["to_plain"] >= SLOWER_THAN_PLAIN and least["to_best"] >= SLOWER_THAN_BEST
    print(json.dumps({"least": least, "passed": passed}))
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
