"""Does tuning find the best setting, and are its predictions right?

    python scripts/tune_check.py --prompt-file questions.jsonl --out check.json

Tunes on every other prompt, as `specdec tune` does. Then the prompts between are decoded with 24 trees, with the tuned
one and plainly, in turn, and tokens/s are compared with what was predicted for these prompts. Prints a table and writes
JSON; the last line is one JSON object. Ends with 1 unless the tuned tree is within 5 % of the best of the 24, and the
predictions are within 15 % of the measurements at the median.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import checkout  # noqa: F401
from rich.table import Table

from specdec.cli.errors import one_sentence_errors
from specdec.cli.terminal import console
from specdec.engine.recorder import versions
from specdec.lab.cost.kept import measured_costs
from specdec.lab.cost.rounds import NODES, WIDTHS, useful_trees
from specdec.lab.cost.tune import measure_rates, predict_all, tune
from specdec.lab.machine import machine
from specdec.lab.models import add_model_flags, load_models, read_encoded
from specdec.lab.output import progress_bar, write_json
from specdec.lab.replay import record
from specdec.structs import Sampling
from specdec.trees.spec import TreeSpec

STEPS = 6
TREES = [TreeSpec(1, steps, steps + 1) for steps in range(1, 7)] + [
    TreeSpec(*shape)
    for shape in (
        (2, 1, 3), (2, 2, 4), (2, 2, 6), (2, 3, 8), (2, 4, 12), (2, 6, 16),
        (4, 1, 4), (4, 2, 6), (4, 2, 12), (4, 3, 16), (4, 5, 16), (4, 6, 32),
        (8, 1, 6), (8, 1, 8), (8, 2, 16), (8, 3, 24), (8, 4, 32), (8, 6, 32),
    )
]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(p)
    p.add_argument("--prompt-file", type=Path, required=True)
    p.add_argument("--limit", type=int, default=32, help="prompts, half of them to tune on")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--tries", type=int, default=4)
    p.add_argument("--remeasure", action="store_true", help="do not use kept costs")
    p.add_argument("--out", type=Path, required=True, help="JSON")
    return p


def print_table(rows: list[dict], title: str) -> None:
    table = Table("", "predicted", "measured", "predicted to measured", "tau predicted", "tau", title=title)
    for row in sorted(rows, key=lambda row: -row["measured"]):
        ratio = f"{row['predicted'] / row['measured']:.3f}"
        taus = f"{row['predicted_tau']:.3f}", f"{row['measured_tau']:.3f}"
        table.add_row(row["name"], f"{row['predicted']:.1f}", f"{row['measured']:.1f}", ratio, *taus)
    console(110).print(table)


def conclude(rows: list[dict], chosen: str) -> dict:
    """What the check shows. rows: those of the 24 trees, of the chosen one, and of plain decoding."""
    rates = {row["name"]: row["measured"] for row in rows}
    best = max(rates[str(s)] for s in TREES)
    ratios = [row["predicted"] / row["measured"] for row in rows]
    errors = [abs(ratio - 1) for ratio in ratios]
    median, common = statistics.median(errors), statistics.median(ratios)
    return {
        "tuned_setting": chosen,
        "tuned_tokens_per_second": rates[chosen],
        "best_of_24": max(map(str, TREES), key=rates.get),
        "best_of_24_tokens_per_second": best,
        "plain_tokens_per_second": rates["plain"],
        "plain_is_faster_than_all": rates["plain"] > max(best, rates[chosen]),
        "tuned_to_best": rates[chosen] / best,
        "median_error": median,
        "largest_error": max(errors),
        # A machine that is busier now than when costs were measured slows all by one factor: what is left without it.
        "median_error_beside_a_common_factor": statistics.median(abs(ratio / common - 1) for ratio in ratios),
        "passed": rates[chosen] >= 0.95 * best and median <= 0.15,
    }


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    target, drafter = load_models(args)
    prompts = read_encoded(target, args.prompt_file, args.limit)
    if len(prompts) < 2:
        raise ValueError("give at least two prompts: one to tune on, one to check with")
    tuning, checking = prompts[::2], prompts[1::2]
    costs = measured_costs(
        target,
        drafter,
        [token for prompt in tuning for token in prompt],
        remeasure=args.remeasure,
        topks=WIDTHS,
        steps=STEPS,
        nodes=NODES,
        batches=[1],
        sampling=Sampling(),
        repeats=args.repeats,
        progress=progress_bar("costs"),
    )
    how = {"max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
    replays = [
        record(target, drafter, some, topks=WIDTHS, steps=STEPS, max_new_tokens=args.max_new_tokens)
        for some in (tuning, checking)
    ]
    tuned = tune(
        costs, replays[0], useful_trees(WIDTHS, STEPS, NODES), target, drafter, tuning, tries=args.tries, **how
    )
    chosen = tuned.best_draft[0].tree
    tried = list(dict.fromkeys([*TREES, chosen]))
    plain, ranking = predict_all(costs, replays[1], tried, [len(prompt) for prompt in checking])
    found = measure_rates(target, drafter, checking, [None, *tried], progress=progress_bar("real runs"), **how)
    predicted = {p.tree: p for p in (plain, *ranking)}
    rows = [
        {
            "name": "plain" if m.tree is None else str(m.tree),
            "predicted": predicted[m.tree].tokens_per_second,
            "measured": m.tokens_per_second,
            "predicted_tau": predicted[m.tree].tau,
            "measured_tau": m.tau,
            "same_text_as_plain": sum(a == b for a, b in zip(m.texts, found[0].texts, strict=True)),
        }
        for m in found
    ]
    result = conclude(rows, str(chosen))
    print_table(rows, f"tokens/s on {len(checking)} prompts; tuned on {len(tuning)} others: {tuned.verdict}")
    content = result | {
        "rows": rows, "fit_error": statistics.median(costs.errors()), "prompts": [len(tuning), len(checking)], **how,
        "machine": machine(target.device), "versions": versions(),
    }  # fmt: skip
    write_json(args.out, content)
    print(json.dumps(result))
    if not result["passed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
