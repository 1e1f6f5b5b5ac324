"""Loads of the server on this machine, in one run: throughput and latencies of plain, fixed and adaptive decoding.

    python scripts/serve_load.py --prompts MT_BENCH --out runs/load

A server of each way is started, and all of them live side by side. At each load, closed loop, so many chats at a time,
with answers of many lengths, the same for all, the ways take turns --repeats times: only one of them is asked at a
time. Medians count. The machine must be idle. Writes load.json, load.md and load.png into the folder, anew after every
turn. Ends with what each adaptive way lost or gained at each load against the better of plain and the fixed ways: the
median of the turns' ratios.
"""

import argparse
import asyncio
import statistics
from contextlib import ExitStack
from pathlib import Path

import checkout  # noqa: F401
import torch

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import write_text
from specdec.lab.load import bench_serve
from specdec.lab.load.chart import write_chart
from specdec.lab.load.served import served
from specdec.lab.machine import provenance
from specdec.lab.output import write_json
from specdec.lab.sweep.benchmarks import load_benchmark

TREE = ["--topk", "4", "--steps", "5", "--num-draft-tokens", "16"]
CHAIN = ["--topk", "1", "--steps", "5"]
ROOM = 640
SHORT = ["--topk", "1", "--steps", "3", "--adaptive", "ema"]  # as a CPU does by default
WAYS = {
    "plain": ["--no-draft"],
    "plain, compiled": ["--no-draft", "--compile"],
    "by default": SHORT,
    "by default, compiled": [*SHORT, "--compile"],
    "fixed 4/5/16": TREE,
    "fixed chain of 2": ["--topk", "1", "--steps", "2"],
    "table, tree": [*TREE, "--adaptive", "table"],
    "survival, tree": [*TREE, "--adaptive", "survival"],
    "table, chain": [*CHAIN, "--adaptive", "table"],
    "ema, chain": [*CHAIN, "--adaptive", "ema"],
    "survival, chain": [*CHAIN, "--adaptive", "survival"],
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load_flags(p)
    p.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    p.add_argument("--num-prompts", type=int, default=264, help="of a turn at most: 8 and 8 for each chat at a time")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--range-ratio", type=float, default=0.5, help="by which that number varies (default 0.5)")
    p.add_argument("--repeats", type=int, default=3)
    return p


def add_load_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument("--prompts", required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--draft", default="demo/mtp")
    p.add_argument("--token-map", default="demo/frspec_4096.json", help="of the drafter; '' for none")
    p.add_argument("--draft-dtype", default="int8", help="(default int8, as in `make demo`); '' for its own")
    p.add_argument("--concurrency", default="1,2,4,8,16,32")


def serve_flags(args: argparse.Namespace, words: list[str], rows: int) -> list[str]:
    """What `specdec serve` is told for a way."""
    given = {"--draft": args.draft, "--token-map": args.token_map, "--draft-dtype": args.draft_dtype}
    draft = [] if "--no-draft" in words else [word for pair in given.items() if pair[1] for word in pair]
    return ["--batch-size", str(rows), "--room", str(ROOM), *draft, *words]


@one_sentence_errors
def main() -> None:
    args = parser().parse_args()
    loads = [int(load) for load in args.concurrency.split(",")]
    questions = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=args.num_prompts).questions
    prompts = [questions[i % len(questions)].turns[0] for i in range(args.num_prompts)]
    turns: dict[str, list[list[dict]]] = {way: [[] for _ in loads] for way in args.ways}
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        urls = {way: stack.enter_context(served(serve_flags(args, WAYS[way], max(loads)))) + "/v1" for way in args.ways}
        for repeat in range(args.repeats):
            for at, load in enumerate(loads):
                for way, url in urls.items():
                    turns[way][at].append(measure(args, url, load, prompts[: 8 + 8 * load]))
            report(args, turns)
            print(f"turn {repeat + 1} of {args.repeats}", flush=True)
    print(table({way: [median(points) for points in found] for way, found in turns.items()}))
    print(verdict(turns))


def report(args: argparse.Namespace, turns: dict[str, list[list[dict]]]) -> None:
    told = {way: [median(points) for points in found] for way, found in turns.items()}
    speeds = {way: [[p["tokens_per_second"] for p in points] for points in found] for way, found in turns.items()}
    machine = provenance(torch.device("cpu"))
    content = {"machine": machine, "settings": str(vars(args)), "tokens_per_second_by_turn": speeds, "loads": told}
    write_json(args.out / "load.json", content)
    write_text(args.out / "load.md", table(told) + "\n" + verdict(turns) + "\n")
    write_chart(args.out / "load.png", told)


def measure(args: argparse.Namespace, url: str, load: int, prompts: list[str]) -> dict:
    """Figures of one load. ValueError unless every answer is valid."""
    asked = ["--prompts", "-", "--base-url", url, "--max-new-tokens", str(args.max_new_tokens), "--ignore-eos"]
    asked += ["--range-ratio", str(args.range_ratio)]
    asked += ["--concurrency", str(load), "--warm-up", str(load)]
    [point] = asyncio.run(bench_serve.measure(bench_serve.parser().parse_args(asked), prompts))["loads"]
    if point["wrong"]:
        raise ValueError(f"answers are not valid: {point['wrong'][0]}")
    return point


def median(turns: list[dict]) -> dict:
    """The turn whose throughput is the median."""
    ranked = sorted(turns, key=lambda point: point["tokens_per_second"])
    return ranked[(len(ranked) - 1) // 2]


def table(told: dict[str, list[dict]]) -> str:
    """Markdown: tokens/s, median TTFT and TPOT in ms, by way and load."""
    loads = [str(point["concurrency"]) for point in next(iter(told.values()))]
    lines = [f"| tokens/s (TTFT, TPOT) | {' | '.join(loads)} |", f"|---|{'---|' * len(loads)}"]
    for way, points in told.items():
        cells = [
            f"{p['tokens_per_second']:.0f} ({p['ttft_ms']['median']:.0f}, {p['tpot_ms']['median']:.1f})" for p in points
        ]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def verdict(turns: dict[str, list[list[dict]]]) -> str:
    """Adaptive ways against the better of plain and the fixed ones, load by load."""
    speeds = {way: [[p["tokens_per_second"] for p in points] for points in found] for way, found in turns.items()}
    fixed = [way for way in speeds if way == "plain" or way.startswith("fixed")]
    lines = []
    for way in [way for way in speeds if fixed and way not in fixed]:
        ratios = []
        for at, mine in enumerate(speeds[way]):
            better = max((speeds[other][at] for other in fixed), key=statistics.median)
            ratios.append(statistics.median(a / b for a, b in zip(mine, better, strict=True)))
        lines.append(f"{way}: {' '.join(f'{ratio:.3f}' for ratio in ratios)} of the better of {', '.join(fixed)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
