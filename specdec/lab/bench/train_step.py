"""Throughput of one EAGLE-3 training step: ours against `plain_eagle3`, same weights, batches and losses, in one run.

    python -m specdec.lab.bench.train_step --hidden 256 --vocab 8192 --learnt 1.0 0.5
    python -m specdec.lab.bench.train_step --data conversations.jsonl

Without --data weights and tokens are random, and the last part `learnt` of each row counts; one JSON line is printed
for each `learnt`. With --data the bundled target, or --target, reads conversations in the batches in which the trainer
learns them, and the assistant's tokens count. The head is random in both cases. A step is the loss and its gradients:
the target's forward pass and the optimiser are the same for both, and left out. The implementations alternate, and the
fastest step of each counts. Tokens are all positions of a batch, padding too.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from specdec.api import DEMO_TARGET, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.drafters import eagle3
from specdec.drafters.eagle3 import Eagle3
from specdec.lab.bench.pair import random_batch, random_pair
from specdec.lab.bench.plain_eagle3 import PlainEagle3
from specdec.model.target import Target
from specdec.training.data import Batch, Batches, read_conversations, tokenise
from specdec.training.features.online import Features, online_features
from specdec.training.objectives.eagle3 import Eagle3Objective


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def random_case(args: argparse.Namespace, learnt: float) -> tuple[Target, Eagle3, list[Batch]]:
    target, drafter = random_pair(args.vocab, args.hidden)
    return target, drafter, [random_batch(args.vocab, args.rows, args.length, learnt)]


def real_case(args: argparse.Namespace) -> tuple[Target, Eagle3, list[Batch]]:
    """A head for all tokens of a target, and batches spread over an epoch of the first 2,000 conversations."""
    target = load_target(args.target)
    samples = tokenise(target.tokenizer, read_conversations(args.data), args.length, limit=2000)
    batches = Batches(samples, args.rows * args.length, seed=0)
    epoch = batches.epoch(0)
    chosen = epoch[:: max(len(epoch) // args.batches, 1)][: args.batches]
    torch.manual_seed(0)
    return target, eagle3.create(target, init="random"), [batches.collate(indices) for indices in chosen]


def compare(args: argparse.Namespace, target: Target, drafter: Eagle3, batches: list[Batch]) -> dict:
    plain, objective = PlainEagle3(drafter).to(args.device), Eagle3Objective(args.steps, 0.8)
    target.to(args.device), drafter.to(args.device)
    # The plain step needs the target's logits whole.
    inputs = [online_features(target, batch, drafter.taps, nullcontext(), deferred=False) for batch in batches]

    def our_step(features: Features) -> list[float]:
        drafter.zero_grad()
        loss, metrics = objective(drafter, **features)
        loss.backward()
        return metrics["losses"].tolist()

    def plain_step(features: Features) -> list[float]:
        plain.zero_grad()
        loss, losses = plain(**features, steps=args.steps, decay=0.8)
        loss.backward()
        return losses

    difference = max(abs(a - b) for a, b in zip(our_step(inputs[0]), plain_step(inputs[0]), strict=True))
    gradients = [(drafter.head.weight.grad, plain.head.weight.grad), (drafter.fc.weight.grad, plain.fc.weight.grad)]
    apart = max(((a - b).norm() / b.norm()).item() for a, b in gradients)
    if difference > 1e-4 or apart > 1e-4:
        raise SystemExit(f"the implementations differ: losses by {difference:.1e}, gradients by {apart:.1e}")
    with torch.autocast(args.device, torch.bfloat16, enabled=args.autocast == "bf16"):
        trials = [
            [(seconds(partial(our_step, f)), seconds(partial(plain_step, f))) for f in inputs]
            for _ in range(args.trials)
        ]
    # The fastest trial of each batch counts.
    ours, theirs = torch.tensor(trials).amin(0).sum(0).tolist()
    tokens = sum(batch.tokens.numel() for batch in batches)
    return {
        "learnt": round(sum(batch.loss_mask.sum().item() for batch in batches) / tokens, 3),
        "tokens_per_second": round(tokens / ours, 1),
        "plain_tokens_per_second": round(tokens / theirs, 1),
        "ratio": round(theirs / ours, 2),
        "loss_difference": difference,
        "gradient_difference": apart,
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("vocab", 8192), ("rows", 2), ("length", 512), ("steps", 7), ("trials", 3)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--learnt", type=float, nargs="+", default=[1.0, 0.5], help="shares of the assistant's tokens")
    p.add_argument(
        "--data", type=Path, help="conversations, in place of random tokens; longer ones are cut at --length"
    )
    p.add_argument("--target", default=DEMO_TARGET, help="whose tokens and features they get")
    p.add_argument("--batches", type=int, default=4, help="of the conversations, of rows * length tokens at most each")
    p.add_argument("--device", default="cpu")
    p.add_argument("--autocast", choices=["bf16"], help="matrix products in bf16, in both; equality is checked in fp32")
    return p


@one_sentence_errors
def main() -> None:
    args = parser().parse_args()
    for learnt in args.learnt[:1] if args.data else args.learnt:
        case = real_case(args) if args.data else random_case(args, learnt)
        print(json.dumps(vars(args) | compare(args, *case), default=str), flush=True)


if __name__ == "__main__":
    main()
