"""1,000 generations of random lengths in one process: is memory flat, and every output that of a fresh start?

    python scripts/drift_check.py --out drift.json

Generations are plain and speculative, greedy and sampled, of one to three random prompts. Every output is compared with
that of an engine and a drafter made for it alone. --fresh outputs, evenly spread, are compared with that of a process
that does nothing else; it is forked from one that has imported all modules, and takes a second. Memory is the resident
set (on a GPU also what torch has allocated) after every 50 generations, garbage collected. From the 50th on it may grow
by --allow-mib, and the number of objects that Python knows by --allow-objects. Ends with 1 if anything fails; the last
line is one JSON object.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import checkout  # noqa: F401
import torch
from tqdm import tqdm

from specdec.api import DEMO_DRAFTER, DEMO_TARGET, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.engine.engine import Engine
from specdec.lab.bench.drift import DriftCase, MemoryGrowth, decode_all, different
from specdec.lab.cost.memory import resident_bytes
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts
from specdec.lab.output import write_json
from specdec.model.target import Target
from specdec.trees.spec import TreeSpec

MIB = 2**20
IMPORTED = (
    "tqdm",
    "specdec.api",
    "specdec.lab.bench.drift",
    "specdec.lab.cost.memory",
    "specdec.lab.machine",
)  # and with them the rest


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", default=str(DEMO_TARGET))
    p.add_argument("--draft", default=str(DEMO_DRAFTER))
    p.add_argument("--generations", type=int, default=1000)
    p.add_argument(
        "--every", type=int, default=50, help="generations between two looks at memory; the first is the base"
    )
    p.add_argument("--fresh", type=int, help="generations repeated in a process of their own; default: every tenth")
    p.add_argument("--prompt-tokens", type=int, default=128, help="at most")
    p.add_argument("--new-tokens", type=int, default=32, help="at most")
    p.add_argument("--allow-mib", type=float, default=16.0)
    p.add_argument("--allow-objects", type=int, default=200)
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, help="a JSON file")
    args = p.parse_args()
    args.fresh = args.generations // 10 if args.fresh is None else args.fresh
    check_counts(args, "generations", "every", "prompt_tokens", "new_tokens")
    if args.generations < 2 * args.every:
        raise ValueError(f"--generations must be at least twice --every, {2 * args.every}, got {args.generations}")
    if not 0 <= args.fresh <= args.generations:
        raise ValueError(f"--fresh must lie between 0 and --generations, got {args.fresh}")
    return args


def make_engine(target: Target, draft: str, speculative: bool) -> Engine:
    return Engine(target, load_drafter(draft, target), TreeSpec().build()) if speculative else Engine(target)


def draw_case(args: argparse.Namespace, target: Target, number: int) -> DriftCase:
    return DriftCase.draw(args.seed, number, target.vocab, args.prompt_tokens, args.new_tokens)


def decode_alone(args: argparse.Namespace, number: int) -> str:
    """The digest of one generation in a process that has done nothing before."""
    target = load_target(args.target, device=args.device, tokenizer=False)
    case = draw_case(args, target, number)
    return case.decode(make_engine(target, args.draft, case.speculative))


def fresh_digests(args: argparse.Namespace, numbers: list[int]) -> Iterator[str]:
    """The digests of these generations, each from a process of its own."""
    if not numbers:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    with context.Pool(1, maxtasksperchild=1) as pool:
        yield from pool.imap(partial(decode_alone, args), numbers)


@one_sentence_errors
def main() -> None:
    args = arguments()
    target = load_target(args.target, device=args.device, tokenizer=False)
    make = partial(make_engine, target, args.draft)
    cases = [draw_case(args, target, number) for number in range(args.generations)]
    memory = resident_bytes if args.device == "cpu" else lambda: resident_bytes() + torch.cuda.memory_allocated()
    with tqdm(total=2 * len(cases) + args.fresh, desc="generations", mininterval=5) as bar:
        digests, marks = decode_all(make, cases, args.every, memory, bar.update)
        other = different(make, cases, digests, bar.update)
        sample = [i * args.generations // args.fresh for i in range(args.fresh)]
        strange = []
        for number, digest in zip(sample, fresh_digests(args, sample), strict=True):
            if digest != digests[number]:
                strange.append(number)
            bar.update()
    growth = MemoryGrowth.of(marks)
    flat = growth.bytes <= args.allow_mib * MIB and growth.objects <= args.allow_objects
    result = provenance(target.device) | {
        "ok": flat and not other and not strange,
        "generations": args.generations,
        "equal_to_a_new_engine": args.generations - len(other),
        "equal_to_a_fresh_process": f"{len(sample) - len(strange)} of {len(sample)}",
        "different": {"new_engine": other, "fresh_process": strange},
        "grown_mib": round(growth.bytes / MIB, 2),
        "grown_objects": growth.objects,
        "marks": [asdict(mark) for mark in marks],
    }
    if args.out is not None:
        write_json(args.out, result)
    print(
        f"{args.generations} generations: from the {args.every}th on memory grew by {result['grown_mib']} MiB and "
        f"{growth.objects} objects; {len(other)} differ from a new engine's, {len(strange)} of {len(sample)} from a "
        "fresh process's"
    )
    print(json.dumps({key: result[key] for key in ("ok", "generations", "grown_mib", "grown_objects", "different")}))
    if not result["ok"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
