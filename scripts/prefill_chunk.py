"""What it costs to read a prompt in parts, and how long running rows wait for one: which --prefill-chunk suits here.

    python scripts/prefill_chunk.py --out prefill.json

A long prompt of random tokens joins --rows rows that run. For every size of a part: seconds until all of it is read,
without those of the rounds in between, and the longest that the running rows wait between two rounds. Seconds are those
of the process on its processors, so that other work counts little; a GPU has its own clock. The medians of --repeats
turns count. The last line is one JSON object.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import checkout  # noqa: F401
import torch

from specdec.api import DEMO_DRAFTER, DEMO_TARGET, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.engine.engine import Engine
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts
from specdec.lab.output import write_json
from specdec.trees import DynamicTree


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", default=str(DEMO_TARGET))
    p.add_argument("--draft", default=str(DEMO_DRAFTER))
    p.add_argument("--device", default="cpu")
    p.add_argument("--prompt-tokens", type=int, default=900)
    p.add_argument("--rows", type=int, default=7)
    p.add_argument("--parts", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024])
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--out", type=Path, help="a JSON file")
    args = p.parse_args()
    check_counts(args, "prompt_tokens", "rows", "repeats")
    return args


def clock(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def joining(engine: Engine, prompt: list[int], rows: int, part: int) -> tuple[float, float, float]:
    """Seconds of all that is read, of the longest step that reads, and of a round, the median."""
    engine.reserve(rows + 1, len(prompt) + 64, part=part)
    for row in range(rows):
        engine.add(prompt[row : row + 32], max_new_tokens=len(prompt), eos=frozenset())
    engine.step()
    for _ in range(3):
        engine.step()
    long = engine.add(prompt, max_new_tokens=2, eos=frozenset())
    reads, rounds = [], []
    while not long.tokens:
        start = clock(engine.device)
        report = engine.step()
        (reads if report.prefill else rounds).append(clock(engine.device) - start)
    for _ in range(3):
        start = clock(engine.device)
        engine.step()
        rounds.append(clock(engine.device) - start)
    return sum(reads), max(reads), statistics.median(rounds)


@one_sentence_errors
def main() -> None:
    args = arguments()
    target = load_target(args.target, device=args.device)
    engine = Engine(target, load_drafter(args.draft, target), DynamicTree(4, 5, 16))
    rng = random.Random(0)
    prompt = [rng.randrange(target.config.vocab) for _ in range(args.prompt_tokens)]
    turns = {part: [] for part in args.parts}
    for _ in range(args.repeats):
        for part, found in turns.items():
            found.append(joining(engine, prompt, args.rows, part))
    told = []
    for part, found in turns.items():
        whole, longest, round_ = (round(1000 * statistics.median(values), 1) for values in zip(*found, strict=True))
        told.append({"part": part, "whole_ms": whole, "longest_ms": longest, "round_ms": round_})
        print(told[-1], flush=True)
    result = provenance(engine.device) | {"prompt_tokens": args.prompt_tokens, "rows": args.rows, "parts": told}
    if args.out is not None:
        write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
