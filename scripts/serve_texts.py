"""A crowd of mixed requests to servers of the bundled pair: is every text the one that the request has alone?

    python scripts/serve_texts.py --prompts MT_BENCH --out docs/serve_texts.json

Chats and completions, greedy and drawn, with penalties, stop strings, n and log-probabilities, whole and streamed. Some
clients go away in the middle, some bodies are malformed, some are too large. Every answer is compared with plain
decoding of its request alone, and tokens, usage, rows and memory with what is left and counted. Ends with 1 if anything
is wrong; the last line is one JSON object.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import checkout  # noqa: F401
import torch
from tqdm import tqdm

from specdec.api import DEMO_TARGET, load_drafter, load_target
from specdec.calibrate import make_policy
from specdec.cli.errors import one_sentence_errors
from specdec.engine.engine import Engine
from specdec.lab.load.crowd import Alone, Sizes
from specdec.lab.load.crowd_run import Crowd, run
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts
from specdec.lab.output import write_json
from specdec.lab.sweep.benchmarks import load_benchmark
from specdec.trees import Chain, DynamicTree

WARM_UP = 24


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", required=True)
    p.add_argument("--requests", type=int, default=500)
    p.add_argument("--at-once", type=int, default=32)
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--prefill-chunk", type=int, default=64, help="(default 64: many prompts are read in parts)")
    p.add_argument("--prefix-cache", type=int, default=4, help="MiB (default 4: some prompts are kept, and not all)")
    p.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    p.add_argument("--out", type=Path, help="a JSON file")
    args = p.parse_args()
    check_counts(args, "requests", "at_once", "rows", "prefill_chunk")
    return args


def tree(target, rows: int, **how) -> Engine:
    return Engine(target, load_drafter("demo/eagle3", target), DynamicTree(4, 5, 16), **how)


def overlapped(target, rows: int, **how) -> Engine:
    return Engine(target, load_drafter("demo/eagle3", target), Chain(5), overlap=True, **how)


def survival(target, rows: int, **how) -> Engine:
    drafter, policy = load_drafter("demo/mtp", target), DynamicTree(4, 5, 16)
    how["adaptive"] = make_policy("survival", target, drafter, policy, rows=rows)
    return Engine(target, drafter, policy, **how)


WAYS = {
    "EAGLE-3, 4/5/16": tree,
    "EAGLE-3, chain of 5, overlapped": overlapped,
    "MTP, 4/5/16, survival": survival,
}


@one_sentence_errors
def main() -> None:
    args, sizes = arguments(), Sizes()
    questions = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=80).questions
    target = load_target(DEMO_TARGET)
    with tqdm(desc="alone", total=args.requests + WARM_UP + 2, disable=None) as bar:
        prompts = [question.turns[0] for question in questions]
        crowd = Crowd.draw(Alone(target), args.requests, prompts, sizes, WARM_UP, bar.update)
    told: dict[str, dict] = {}
    result = provenance(torch.device("cpu")) | {"requests": args.requests, "at_once": args.at_once, "rows": args.rows}
    result |= {"prefill_chunk": args.prefill_chunk, "prefix_cache": args.prefix_cache, "ways": told}
    for way in args.ways:
        how = {"at_once": args.at_once, "warm_up": WARM_UP, "rows": args.rows}
        how["prefill_chunk"] = args.prefill_chunk
        engine = WAYS[way](target, args.rows, prefixes=args.prefix_cache << 20)
        told[way] = asyncio.run(run(engine, crowd, sizes, **how))
        print(way, {name: value for name, value in told[way].items() if name not in ("before", "after")}, flush=True)
        if args.out is not None:
            write_json(args.out, result)
    print(table(told))
    print(json.dumps(told))
    sys.exit(any(one["wrong"] for one in told.values()))


def table(told: dict[str, dict]) -> str:
    """Markdown."""
    columns = ("requests", "answered", "texts", "tokens", "tau", "went_away", "refused", "wrong")
    lines = [f"| server | {' | '.join(name.replace('_', ' ') for name in columns)} |", "|---" * 9 + "|"]
    for way, one in told.items():
        values = one | {"wrong": len(one["wrong"])}
        lines.append(f"| {way} | {' | '.join(str(values[name]) for name in columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
