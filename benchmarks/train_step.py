"""Throughput of one EAGLE-3 training step: ours against `plain_eagle3`, same weights, batch and losses, in one run.

    python -m benchmarks.train_step --hidden 256 --vocab 8192 --learnt 1.0 0.5

Prints one JSON line for each share of learnt positions. A step is the loss and its gradients; the target's forward pass
and the optimiser, the same for both, are left out. The implementations alternate, and the fastest of each counts.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

from benchmarks.pair import random_batch, random_pair
from benchmarks.plain_eagle3 import PlainEagle3
from training.features import online_features
from training.objectives.eagle3 import Eagle3Objective


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(args: argparse.Namespace, learnt: float) -> dict:
    target, drafter = random_pair(args.vocab, args.hidden)
    plain, objective = PlainEagle3(drafter).to(args.device), Eagle3Objective(args.steps, 0.8)
    target.to(args.device), drafter.to(args.device)
    batch = random_batch(args.vocab, args.rows, args.length, learnt)
    inputs = online_features(
        target, batch, drafter.taps, nullcontext(), deferred=False
    )  # the plain step needs them whole

    def our_step() -> list[float]:
        drafter.zero_grad()
        loss, metrics = objective(drafter, **inputs)
        loss.backward()
        return metrics["losses"].tolist()

    def plain_step() -> list[float]:
        plain.zero_grad()
        loss, losses = plain(**inputs, steps=args.steps, decay=0.8)
        loss.backward()
        return losses

    difference = max(abs(a - b) for a, b in zip(our_step(), plain_step(), strict=True))
    gradients = [(drafter.head.weight.grad, plain.head.weight.grad), (drafter.fc.weight.grad, plain.fc.weight.grad)]
    apart = max(((a - b).norm() / b.norm()).item() for a, b in gradients)
    if difference > 1e-4 or apart > 1e-4:
        raise SystemExit(f"the implementations differ: losses by {difference:.1e}, gradients by {apart:.1e}")
    with torch.autocast(args.device, torch.bfloat16, enabled=args.autocast == "bf16"):
        times = [(seconds(our_step), seconds(plain_step)) for _ in range(args.trials)]
    ours, theirs = (args.rows * args.length / min(column) for column in zip(*times, strict=True))
    return {
        "learnt": learnt,
        "tokens_per_second": round(ours, 1),
        "plain_tokens_per_second": round(theirs, 1),
        "ratio": round(ours / theirs, 2),
        "loss_difference": difference,
        "gradient_difference": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("vocab", 8192), ("rows", 2), ("length", 512), ("steps", 7), ("trials", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learnt", type=float, nargs="+", default=[1.0, 0.5], help="shares of the assistant's tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--autocast", choices=["bf16"], help="matrix products in bf16, in both; equality is checked in fp32"
    )
    args = parser.parse_args()
    for learnt in args.learnt:
        print(json.dumps(vars(args) | compare(args, learnt)), flush=True)


if __name__ == "__main__":
    main()
