"""tau above temperature 0, by which children trees take and which rule accepts them, at equal numbers of nodes.

    python scripts/children_table.py --prompt-file MT_BENCH --out runs/children.json

Each drafter decodes every prompt with the likeliest children, with children drawn from the drafter under multi-round
rejection and under block verification, and with coupled ones (docs/sampling.md), on trees of 6, 16 and 60 nodes and on
a chain of 5. It prints tau with its 95 % interval over prompts as a Markdown table. What is in the file already is not
decoded again.
"""

import argparse
import json
import math
from pathlib import Path

import checkout  # noqa: F401
import torch

from specdec.api import DEMO_TARGET, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import write_text
from specdec.engine.engine import Engine
from specdec.engine.traces import tau_interval
from specdec.lab.models import read_encoded
from specdec.structs import Sampling
from specdec.trees.spec import TreeSpec
from specdec.verify import make_verifier

SHAPES = {  # by nodes: a tree, a drawn one, and the length of a chain for block verification
    "6": ("2/3/6", "drawn 2,1", 5),
    "6, chain": ("1/5/6", "drawn 1,1,1,1,1", 5),
    "16": ("4/5/16", "drawn 3,1,1,1,1", 15),
    "60": ("10/8/60", "drawn 7,1,1,1,1,1,1,1", 59),
}
LONGEST = 8  # of a drawn chain: behind this hardly any token is accepted
WAYS = ("likeliest", "drawn, rejection", "drawn, block", "coupled")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompt-file", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True, help="a JSON file of what was measured")
    p.add_argument("--draft", nargs="+", default=["demo/eagle3", "demo/mtp", "ngram"])
    p.add_argument("--temperature", nargs="+", type=float, default=[1.0, 0.7])
    p.add_argument(
        "--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES)
    )
    p.add_argument("--limit", type=int, help="prompts")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--seed", type=int, default=0)
    return p


def engine_of(target, drafter, way: str, shape: str) -> Engine:
    """Trees of at most so many nodes; a chain for block verification."""
    dynamic, drawn, chain = SHAPES[shape]
    if way in ("likeliest", "coupled"):
        return Engine(target, drafter, TreeSpec.parse(dynamic).build(), children=way)
    spec = TreeSpec.parse(drawn) if way.endswith("rejection") else TreeSpec.drawn([1] * min(chain, LONGEST))
    return Engine(target, drafter, spec.build(), make_verifier(way.split(", ")[1]))


def measure(engine: Engine, prompts: list[list[int]], temperature: float, args) -> list[list[int]]:
    """Of each prompt the rounds, and the tokens that they emitted."""
    how = {"max_new_tokens": args.max_new_tokens, "sampling": Sampling(temperature)}
    traces = [engine.generate([p], seed=[(args.seed, i)], **how).rows[0].trace for i, p in enumerate(prompts)]
    return [[trace.rounds, sum(trace.emitted)] for trace in traces]


def measured(rounds: list[list[int]]) -> tuple[float, ...]:
    """tau, and its 95 % interval over prompts if there are two or more."""
    counted = torch.tensor(rounds)
    total, emitted = counted.sum(0).tolist()
    return emitted / total, *(tau_interval(counted) or (math.nan, math.nan))


def table(found: dict[str, list[list[int]]], args) -> str:
    """A row for each drafter and shape, with the ways of each temperature side by side."""
    columns = [(temperature, way) for temperature in args.temperature for way in WAYS]
    lines = ["| drafter | nodes | " + " | ".join(f"{way}, T {temperature:g}" for temperature, way in columns) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for draft in args.draft:
        for shape in args.shape:
            taus = (measured(found[key(draft, temperature, shape, way)]) for temperature, way in columns)
            cells = ["{:.2f} ({:.2f}-{:.2f})".format(*tau) for tau in taus]
            lines.append(f"| {draft} | {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def key(draft: str, temperature: float, shape: str, way: str) -> str:
    return f"{draft}; {temperature:g}; {shape}; {way}"


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    target = load_target(DEMO_TARGET)
    prompts = read_encoded(target, args.prompt_file, args.limit)
    found = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
    for draft in args.draft:
        drafter = load_drafter(draft, target)
        for temperature in args.temperature:
            for shape in args.shape:
                for way in WAYS:
                    name = key(draft, temperature, shape, way)
                    if len(found.get(name, [])) != len(prompts):
                        found[name] = measure(engine_of(target, drafter, way, shape), prompts, temperature, args)
                        write_text(args.out, json.dumps(found) + "\n")
                        print("{}: {:.3f} ({:.3f}–{:.3f})".format(name, *measured(found[name])), flush=True)
    print(table(found, args))


if __name__ == "__main__":
    main()
