"""Peak memory of the objective of a training step at a large vocabulary, one process for each way to compute it.

    python -m specdec.lab.bench.objective_memory --vocab 128000 --length 2048 --hidden 256 --steps 3

Prints one JSON line for each way: `plain` keeps whole matrices (`plain_eagle3`), `pieces` is ours, `deferred` ours with
the target's logits in pieces too. rest_gib is the process before the step: weights, libraries, the batch. A logits
matrix [length, vocab] in fp32 has matrix_gib. The peak is `ru_maxrss` on the CPU.
"""

import argparse
import time
from contextlib import nullcontext

from specdec.cli.errors import one_sentence_errors
from specdec.lab.bench.by_way import by_way, peak_gib
from specdec.lab.bench.pair import random_batch, random_pair
from specdec.lab.bench.plain_eagle3 import PlainEagle3
from specdec.training.features.online import online_features
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.terms import all_terms

WAYS = ("plain", "pieces", "deferred")


def measure(args: argparse.Namespace) -> dict:
    target, drafter = random_pair(args.vocab, args.hidden, layers=1)
    learner = PlainEagle3(drafter) if args.way == "plain" else drafter
    batch = random_batch(args.vocab, 1, args.length, args.learnt)
    rest, start = peak_gib(), time.perf_counter()
    inputs = online_features(target, batch, drafter.taps, nullcontext(), deferred=args.way == "deferred")
    if args.way == "plain":
        loss, losses = learner(**inputs, steps=args.steps, decay=0.8)
    else:
        objective = Eagle3Objective(args.steps, 0.8, terms={args.term: 1.0})
        loss, metrics = objective(learner, **inputs)
        losses = metrics["losses"].tolist()
    loss.backward()
    return {
        "way": args.way,
        "peak_gib": round(peak_gib(), 2),
        "rest_gib": round(rest, 2),
        "matrix_gib": round(args.length * args.vocab * 4 / 2**30, 2),
        "seconds": round(time.perf_counter() - start, 1),
        "losses": [round(x, 5) for x in losses],
    }


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocab", 128000), ("length", 2048), ("hidden", 256), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learnt", type=float, default=1.0, help="share of the assistant's tokens")
    parser.add_argument("--term", choices=all_terms(), default="ce", help="of the loss; plain has ce only")
    by_way(parser, WAYS, measure, "specdec.lab.bench.objective_memory")


if __name__ == "__main__":
    main()
