"""Peak memory of the block objective of a training step at a large vocabulary, one process for each way.

    python -m specdec.lab.bench.block_memory --vocab 128000 --length 2048 --block 16 --anchors 512

Prints one JSON line for each way: `plain` makes the logits of all slots at once, `pieces` is ours. rest_gib is the
process before the step. The logits [anchors, slots, vocab] in fp32 have matrix_gib. The peak is `ru_maxrss`.
"""

import argparse
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.cli.errors import one_sentence_errors
from specdec.drafters import dflash
from specdec.lab.bench.by_way import by_way, peak_gib
from specdec.lab.bench.pair import random_batch, random_pair
from specdec.training.features.online import online_features
from specdec.training.objectives.block import BlockObjective

WAYS = ("plain", "pieces")


def plain_loss(objective: BlockObjective, drafter, feats: Tensor, tokens: Tensor, loss_mask: Tensor) -> Tensor:
    """The same loss from one matrix of logits, as one writes it first."""
    slots = objective.slots(drafter, loss_mask, None)
    blocks = drafter.blocks(feats, F.pad(tokens[:, 1:], (0, 1)), slots.anchors - 1)
    row, column = slots.here
    labels = tokens[row, (column + 1).clamp(max=tokens.shape[1] - 1)]
    logits = blocks.head(blocks.readout[slots.chosen])
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    weights = objective.weigh_slots(each.detach(), slots.mask, slots.since)
    return (each * weights).sum() / weights.sum()


def measure(args: argparse.Namespace) -> dict:
    target, _ = random_pair(args.vocab, args.hidden, layers=1)
    drafter = dflash.create(target, layers=1, taps=1, block_size=args.block, init="random")
    batch = random_batch(args.vocab, 1, args.length, learnt=1.0)
    objective = BlockObjective(anchors=args.anchors)
    rest, start = peak_gib(), time.perf_counter()
    inputs = online_features(target, batch, drafter.taps, nullcontext())
    torch.manual_seed(2)  # of the anchors
    if args.way == "plain":
        loss = plain_loss(objective, drafter, inputs["feats"], inputs["tokens"], inputs["loss_mask"])
    else:
        loss, _ = objective(drafter, **inputs)
    loss.backward()
    return {
        "way": args.way,
        "anchors": args.anchors,
        "peak_gib": round(peak_gib(), 2),
        "rest_gib": round(rest, 2),
        "matrix_gib": round(args.anchors * drafter.block * args.vocab * 4 / 2**30, 2),
        "seconds": round(time.perf_counter() - start, 1),
        "loss": round(loss.item(), 5),
        "gradient": round(drafter.fc.weight.grad.norm().item(), 5),
    }


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"vocab": 128000, "length": 2048, "hidden": 128, "block": 16, "anchors": 512}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    by_way(parser, WAYS, measure, "specdec.lab.bench.block_memory")


if __name__ == "__main__":
    main()
