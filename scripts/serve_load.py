"""Loads of the server on this machine, in one run: throughput and latencies of plain, fixed and adaptive decoding.

    python scripts/serve_load.py --prompts MT_BENCH --out runs/load

For each way a server is started, warmed up and asked: closed loop, so many chats at a time, all answers of one
length. The machine must be idle. Writes load.json, load.md and load.png into the folder, anew after every way. The ways
take turns --repeats times, and the medians count. Ends with what each adaptive way lost or gained against the better
of plain and fixed at each load.
"""

import argparse
import asyncio
import re
import subprocess
import sys
from pathlib import Path

import checkout  # noqa: F401
import torch

from lab.load import bench_serve
from lab.load.chart import write_chart
from lab.machine import provenance
from lab.output import write_json
from lab.sweep.benchmarks import load_benchmark
from specdec.cli.files import write_text

TREE = ["--topk", "4", "--steps", "5", "--num-draft-tokens", "16"]
CHAIN = ["--topk", "1", "--steps", "5"]
WAYS = {
    "plain": ["--no-draft"],
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
    p.add_argument("--prompts", required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--draft", default="specdec/demo/mtp")
    p.add_argument("--concurrency", default="1,2,4,8,16,32")
    p.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    p.add_argument("--num-prompts", type=int, default=64)
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--repeats", type=int, default=1)
    return p


def main() -> None:
    args = parser().parse_args()
    ways = args.ways
    questions = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=args.num_prompts).questions
    prompts = [questions[i % len(questions)].turns[0] for i in range(args.num_prompts)]
    runs: dict[str, list[list[dict]]] = {way: [] for way in ways}
    args.out.mkdir(parents=True, exist_ok=True)
    for _ in range(args.repeats):
        for way in ways:
            runs[way].append(measure(args, WAYS[way], prompts))
            told = {way: medians(found) for way, found in runs.items() if found}
            write_json(
                args.out / "load.json",
                {"machine": provenance(torch.device("cpu")), "settings": str(vars(args)), "loads": told},
            )
            write_text(args.out / "load.md", table(told))
            write_chart(args.out / "load.png", told)
            print(way, " ".join(f"{point['tokens_per_second']:.0f}" for point in runs[way][-1]), flush=True)
    print(table(told))
    print(verdict(told))


def measure(args: argparse.Namespace, words: list[str], prompts: list[str]) -> list[dict]:
    """Figures of every load, of a server of its own."""
    most = max(map(int, args.concurrency.split(",")))
    draft = [] if "--no-draft" in words else ["--draft", args.draft]
    command = [sys.executable, "-m", "specdec", "serve", "--port", "0", "--batch-size", str(most), "--room", "512"]
    server = subprocess.Popen([*command, *draft, *words], stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+", server.stdout.readline())[0]
        asked = ["--prompts", "-", "--base-url", url, "--max-new-tokens", str(args.max_new_tokens), "--ignore-eos"]
        asked += ["--concurrency", args.concurrency, "--warm-up", str(most)]
        run = asyncio.run(bench_serve.measure(bench_serve.parser().parse_args(asked), prompts))
    finally:
        server.terminate()
        server.wait()
    wrong = [point["wrong"] for point in run["loads"] if point["wrong"]]
    if wrong:
        raise ValueError(f"answers are not valid: {wrong[0][0]}")
    return run["loads"]


def medians(runs: list[list[dict]]) -> list[dict]:
    """Of every load the run whose throughput is the median."""
    return [_median(turns) for turns in zip(*runs, strict=True)]


def _median(turns: tuple[dict, ...]) -> dict:
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


def verdict(told: dict[str, list[dict]]) -> str:
    """Adaptive ways against the better of plain and the fixed one of the same tree."""
    lines = []
    for way, points in told.items():
        if way.startswith(("plain", "fixed")):
            continue
        fixed = [name for name in told if name == "plain" or name.startswith("fixed")]
        better = [max(told[name][i]["tokens_per_second"] for name in fixed) for i in range(len(points))]
        ratios = [p["tokens_per_second"] / best for p, best in zip(points, better, strict=True)]
        lines.append(f"{way}: {' '.join(f'{ratio:.3f}' for ratio in ratios)} of the better of {', '.join(fixed)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
