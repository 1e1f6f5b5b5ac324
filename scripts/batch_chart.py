"""Throughput by batch size, plain and speculative:  python scripts/batch_chart.py --prompt-file questions.jsonl

Every batch size decodes the same prompts in groups of that size, so the work is the same. Sizes and the two ways of
decoding take turns, and the median of the trials counts. Decoding is greedy, and each row is compared with its text at
batch size 1. Writes chart.png and result.json under --out and prints a table; the last line is one JSON object.
"""

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import checkout  # noqa: F401
from matplotlib import rc_context
from rich.table import Table
from tqdm import tqdm

from specdec.api import DEMO_TARGET
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_text
from specdec.cli.terminal import console
from specdec.engine.engine import Engine
from specdec.lab.figure_style import COLOURS, STYLE, subplots
from specdec.lab.machine import machine_in_short
from specdec.lab.models import add_model_flags, load_models, read_encoded
from specdec.lab.output import write_figure
from specdec.trees.spec import TreeSpec

PLAIN, SPECULATIVE = "plain", "speculative"


@dataclass
class BatchRate:
    """What one way of decoding reaches at one batch size."""

    how: str  # PLAIN or SPECULATIVE
    batch: int
    tokens_per_second: float  # of all rows together, without the prefill and its tokens; the median of the trials
    least: float  # of the trials
    most: float
    milliseconds_a_round: float
    tokens: int
    same_as_alone: int  # rows whose tokens are those of plain decoding at batch size 1
    rows: int


def flags() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(p)
    p.add_argument("--prompt-file", type=Path, required=True)
    p.add_argument("--limit", type=int, default=32, help="prompts (default 32)")
    p.add_argument("--batch-sizes", default="1,2,4,8,16,32", help="default 1,2,4,8,16,32")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--eos", action="store_true", help="rows end with their text; else all have --max-new-tokens")
    p.add_argument("--trials", type=int, default=3)
    p.add_argument("--topk", type=int, default=4)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--num-draft-tokens", type=int)
    p.add_argument("--raw", action="store_true", help="do not apply the chat template")
    p.add_argument("--out", type=Path, default=Path("runs/batches"))
    return p


def sizes_of(text: str) -> list[int]:
    """The batch sizes in a text such as 1,2,4. Raises ValueError for anything else."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise ValueError(f"--batch-sizes takes numbers from 1 on with commas between, and not {text!r}")
    return sizes


def rates_by_batch(
    engines: dict[str, Engine], prompts: list[list[int]], sizes: list[int], trials: int, **how
) -> list[BatchRate]:
    """Decode all prompts at each size with each engine, in turn, `trials` times after a warm-up.

    how: settings of `Engine.generate`."""
    rates, rounds, texts = defaultdict(list), defaultdict(list), {}
    alone = [engines[PLAIN].generate([prompt], **how).rows[0].tokens for prompt in prompts]
    for trial in tqdm(range(-1, trials), desc="trials", mininterval=1.0):  # trial -1 warms up
        for size in sizes:
            for name, engine in engines.items():
                groups = [prompts[first : first + size] for first in range(0, len(prompts), size)]
                results = [engine.generate(group, **how) for group in groups[: 1 if trial < 0 else None]]
                if trial < 0:
                    continue
                rows = [row for result in results for row in result.rows]
                seconds = sum(result.decode_seconds for result in results)
                turns = sum(max(row.trace.rounds for row in result.rows) for result in results)
                texts[name, size] = [row.tokens for row in rows]
                rates[name, size].append(sum(len(row.tokens) - 1 for row in rows) / seconds)
                rounds[name, size].append(1e3 * seconds / turns)
    return [
        BatchRate(
            how=name,
            batch=size,
            tokens_per_second=statistics.median(found),
            least=min(found),
            most=max(found),
            milliseconds_a_round=statistics.median(rounds[name, size]),
            tokens=sum(map(len, texts[name, size])),
            same_as_alone=sum(a == b for a, b in zip(texts[name, size], alone, strict=True)),
            rows=len(alone),
        )
        for (name, size), found in rates.items()
    ]


def print_rates(points: list[BatchRate]) -> None:
    table = Table(title="throughput by batch size")
    for column in ("batch", "", "tokens/s", "least to most", "ms a round", "against B = 1", "rows as alone"):
        table.add_column(column, justify="right" if column else "left")
    single = {p.how: p.tokens_per_second for p in points if p.batch == min(q.batch for q in points)}
    for p in points:
        spread, gain = f"{p.least:.0f} to {p.most:.0f}", p.tokens_per_second / single[p.how]
        cells = str(p.batch), p.how, f"{p.tokens_per_second:.1f}", spread, f"{p.milliseconds_a_round:.2f}"
        table.add_row(*cells, f"{gain:.2f}", f"{p.same_as_alone} of {p.rows}")
    console(120).print(table)


def draw(points: list[BatchRate], title: str, path: Path) -> None:
    """Draw tokens/s of all rows together, and milliseconds a round, over the batch size."""
    with rc_context(STYLE):
        figure, (left, right) = subplots(1, 2, figsize=(9.6, 3.6))
        figure.suptitle(title)
        for colour, name in zip(COLOURS, (PLAIN, SPECULATIVE), strict=False):
            own = [p for p in points if p.how == name]
            sizes = [p.batch for p in own]
            rate = [p.tokens_per_second for p in own]
            spread = [[p.tokens_per_second - p.least for p in own], [p.most - p.tokens_per_second for p in own]]
            left.errorbar(sizes, rate, yerr=spread, marker="o", capsize=2, color=colour, label=name)
            right.plot(sizes, [p.milliseconds_a_round for p in own], marker="o", color=colour, label=name)
        for axis, label in ((left, "tokens/s, all rows together"), (right, "ms a round")):
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.set_xlabel("rows decoded together")
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
            axis.legend()
        write_figure(path, figure)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = flags().parse_args(argv)
    sizes = sizes_of(args.batch_sizes)
    if min(args.limit, args.trials) < 1:
        raise ValueError(f"--limit and --trials must be at least 1, got {args.limit} and {args.trials}")
    target, drafter = load_models(args)
    output_folder(args.out)
    tree = TreeSpec.of(args.topk, args.steps, args.num_draft_tokens).build()
    engines = {PLAIN: Engine(target), SPECULATIVE: Engine(target, drafter, tree)}
    prompts = read_encoded(target, args.prompt_file, args.limit, args.raw)
    eos = None if args.eos else frozenset()
    points = rates_by_batch(engines, prompts, sizes, args.trials, max_new_tokens=args.max_new_tokens, eos=eos)
    print_rates(points)
    name = Path(target.name).name
    title = f"{name}: {len(prompts)} prompts, {args.max_new_tokens} new tokens, greedy, {args.device}"
    draw(points, title, args.out / "chart.png")
    given = vars(args) | {"target": args.target or DEMO_TARGET}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    result = {
        "points": [asdict(p) for p in points],
        "settings": settings | {"dtype": str(target.dtype).removeprefix("torch.")},
        **machine_in_short(),
    }
    text = json.dumps(result)
    write_text(args.out / "result.json", text + "\n")
    print(text)


if __name__ == "__main__":
    main()
