"""Drafting time of a round by the length of the block, of random block drafters in real rounds.

    python -m specdec.lab.bench.block_draft --blocks 4 8 16

Prints one JSON line for each drafter, block and tree: milliseconds of the fastest round's `extend`, in which the block
is made, and `grow`, in which the tree is, and both together. Trees have the same size at every
block, `--steps` levels and `--nodes` nodes; `deep` is a chain as long as the block. Drafters take turns.
"""

import argparse
import json
from itertools import product

import torch

from specdec.cli.errors import one_sentence_errors
from specdec.drafters import dflash
from specdec.engine.engine import Engine
from specdec.lab.bench.pair import random_pair
from specdec.lab.cost.rounds import TIMED, time_rounds
from specdec.structs import Sampling
from specdec.trees.spec import TreeSpec

KINDS = {
    "dflash": {},
    "dspark": {"conditional": "markov", "label": "p+k+1"},
    "domino": {"conditional": "domino", "label": "p+k+1"},
    "dflash2": {"conditional": "selector", "convolution": 16},
}


def cases(args: argparse.Namespace) -> dict[tuple[str, int, str], Engine]:
    """Engines by drafter, drafted tokens of its block, and tree."""
    target, _ = random_pair(args.vocab, args.hidden)
    found = {}
    for (kind, how), block in product(KINDS.items(), args.blocks):
        rows = block + (how.get("label") != "p+k+1")
        drafter = dflash.create(target, layers=args.layers, taps=2, block_size=rows, **how)
        trees = {
            "chain": TreeSpec(1, args.steps),
            "tree": TreeSpec(4, args.steps, args.nodes),
            "deep": TreeSpec(1, block),
        }
        if not drafter.conditioned:
            trees["block"] = TreeSpec(4, args.steps, args.nodes, block=True)
        for name, tree in trees.items():
            found[kind, block, name] = Engine(target, drafter, tree.build(), **TIMED)
    return found


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"vocab": 8192, "hidden": 256, "layers": 2, "steps": 4, "nodes": 16, "context": 256, "repeats": 5}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8, 16], help="drafted tokens of a block")
    args = parser.parse_args()
    engines = cases(args)
    torch.manual_seed(1)
    prompt = torch.randint(args.vocab, (args.context,)).tolist()
    times = {case: [] for case in engines}
    for repeat, (case, engine) in product(range(-1, args.repeats), engines.items()):  # -1 warms up
        rounds = time_rounds(engine, [prompt], 16, Sampling())
        times[case] += [parts for _, parts in rounds] if repeat >= 0 else []
    for (kind, block, tree), found in times.items():
        parts = {part: min(1e3 * parts[part] for parts in found) for part in ("extend", "grow")}
        told = {f"{part}_ms": round(ms, 3) for part, ms in (parts | {"draft": sum(parts.values())}).items()}
        print(json.dumps({"drafter": kind, "block": block, "tree": tree} | told))


if __name__ == "__main__":
    main()
