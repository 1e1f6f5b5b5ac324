"""What a round of an 8B model launches on a GPU, and what it should cost there: counted and computed, not measured.

    python -m specdec.lab.cost.gpu_round                        # an H100
    python -m specdec.lab.cost.gpu_round --hardware h200 --context 8192 --json

The launches are counted without a GPU (`lab.cost.launches`): one row, bf16, an EAGLE-3 head of 32,000 tokens, greedy
but for one column. The times are those of `lab.cost.roofline` at the rate at which a device-to-device copy was seen to
move bytes there, read and written ones counted, and with a fixed time for every launch in a CUDA graph.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from rich.table import Table

from specdec.cli.errors import one_sentence_errors
from specdec.cli.terminal import console
from specdec.drafters import eagle3
from specdec.drafters.vocab import DraftVocab
from specdec.engine.round import Round
from specdec.kernels import backends
from specdec.lab.cost.absent_gpu import absent_gpu
from specdec.lab.cost.launches import (
    ABSORB,
    COMMIT,
    KEPT,
    ROOT,
    SELECTION,
    SETTLE,
    TARGET,
    VERIFICATION,
    LaunchCounter,
    Launches,
    count_round,
)
from specdec.lab.cost.roofline import CHAIN, CONFIGS, HARDWARE, PLAIN, TREE, Roofline, RoundLaunches, decoder, eagle3_of
from specdec.model.archs import ModelConfig
from specdec.model.rope import Rope
from specdec.model.target import Target
from specdec.structs import Sampling
from specdec.trees.spec import TreeSpec
from specdec.verify import make_verifier

SHAPE, DRAFT_VOCAB, CONTEXT = "llama-3.1-8b", 32000, 1024
COPIES = {"h100": 3.0e12, "h200": 4.3e12}  # bytes/s, read and written, of a device-to-device copy as it was seen
LAUNCH = 1.75e-6  # s; 1.5 to 2 microseconds for a kernel of a CUDA graph
TREES = (TreeSpec(8, 6, 32), TreeSpec(10, 8, 60))
FEW = 3  # layers of the target that is counted, and one more: a count of any number follows


def counted(tree: TreeSpec | None, layers: int = FEW, temperature: float = 0.0, context: int = CONTEXT) -> Launches:
    """Count a round of this tree, or a plain one, with a target of so many layers of the 8B shape."""
    return _counted(tree, layers, temperature, context, backends())


@cache
def _counted(tree: TreeSpec | None, layers: int, temperature: float, context: int, kernels: tuple) -> Launches:
    _, *sizes = CONFIGS[SHAPE]
    hidden, intermediate, heads, kv_heads, head_dim, vocab = sizes
    config = ModelConfig(
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, eps=1e-5, rope=Rope(), context=2 * context,
        tied=False,
    )  # fmt: skip
    counter, drafts = LaunchCounter(), DraftVocab(vocab, torch.arange(DRAFT_VOCAB))
    sampling = Sampling(temperature, top_k=50, top_p=0.9) if temperature else Sampling()
    with torch.inference_mode(), absent_gpu(counter.note) as device:
        target = Target(config).to(device, torch.bfloat16).eval()
        drafter = eagle3.create(target, vocab=drafts, init="random").to(torch.bfloat16).eval() if tree else None
        round_ = Round(target, drafter, tree and tree.build(), make_verifier("match"))
        return count_round(round_, counter, sampling, context)


def counted_launches(context: int = CONTEXT) -> Mapping[str, RoundLaunches]:
    """The launches of rounds of each kind, for `Roofline`."""
    found = {PLAIN: counted(None, context=context)}
    found |= {CHAIN: counted(TreeSpec(1, 5, 6), context=context), TREE: counted(TREES[0], context=context)}
    layer = counted(None, FEW + 1, context=context).of(TARGET) - found[PLAIN].of(TARGET)
    return {kind: _of_parts(launches, layer) for kind, launches in found.items()}


def _of_parts(launches: Launches, layer: int) -> RoundLaunches:
    parts = {part: launches.of(part) for part in (ROOT, SELECTION, VERIFICATION, COMMIT, ABSORB)}
    settle, target = launches.of(SETTLE) + launches.of(KEPT), launches.of(TARGET) - FEW * layer
    return RoundLaunches(**parts, layer=layer, target=target, settle=settle, level=max(launches.levels, default=0))


def launch_table(context: int) -> Table:
    """Launches by part: of a plain token, a chain, and the trees, the larger also sampled."""
    found = {"plain token": counted(None, context=context), "chain of 5": counted(TreeSpec(1, 5, 6), context=context)}
    found |= {f"tree {tree}": counted(tree, context=context) for tree in TREES}
    found[f"tree {TREES[1]}, sampled"] = counted(TREES[1], temperature=0.7, context=context)
    layers, layer = CONFIGS[SHAPE][0], counted_launches(context)[PLAIN].layer
    table = Table(title=f"launches of a round, {SHAPE}, behind {context} tokens")
    table.add_column("part")
    for name in found:
        table.add_column(name, justify="right")
    table.add_row(ROOT, *(str(x.of(ROOT)) for x in found.values()))
    table.add_row("a draft level, at most", *(str(max(x.levels, default=0)) for x in found.values()))
    table.add_row("all draft levels", *(str(sum(x.levels)) for x in found.values()))
    more = (layers - FEW) * layer  # of the layers that were not counted
    for part in (SELECTION, TARGET, VERIFICATION, COMMIT, ABSORB, SETTLE, KEPT):
        table.add_row(part, *(str(x.of(part) + (more if part == TARGET else 0)) for x in found.values()))
    table.add_row("all", *(str(x.total + more) for x in found.values()))
    table.add_row("without the target", *(str(x.total - x.of(TARGET)) for x in found.values()))
    return table


def costs_of(hardware: str, launch: float, context: int) -> Roofline:
    """The 8B pair on a device at the rate of its copies."""
    device = replace(HARDWARE[hardware], bandwidth=COPIES[hardware], bandwidth_share=1.0, launch=launch)
    sizes = CONFIGS[SHAPE]
    return Roofline(device, decoder(*sizes), eagle3_of(*sizes[1:-1], DRAFT_VOCAB), counted_launches(context))


def cost_table(costs: Roofline, context: int, name: str) -> Table:
    """Bytes, launches and microseconds by part."""
    rounds = {"plain": None} | {str(tree): tree for tree in TREES}
    found = {title: costs.parts(tree, context) for title, tree in rounds.items()}
    table = Table(title=name, caption="computed, not measured")
    table.add_column("part", no_wrap=True)
    for title in found:
        for unit in ("MB", "launches", "us"):
            table.add_column(f"{title}\n{unit}", justify="right", no_wrap=True)
    for part in found[str(TREES[0])]:
        row = []
        for parts in found.values():
            cost = parts.get(part)
            row += (
                [f"{cost.bytes / 1e6:.1f}", f"{cost.launches:.0f}", f"{1e6 * cost.seconds:.0f}"] if cost else [""] * 3
            )
        table.add_row(part, *row)
    row = []
    for parts in found.values():
        whole = [sum(cost[i] for cost in parts.values()) for i in range(4)]
        row += [f"{whole[0] / 1e6:.1f}", f"{whole[2]:.0f}", f"{1e6 * whole[3]:.0f}"]
    table.add_row("all", *row)
    return table


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m specdec.lab.cost.gpu_round", description="What a round of an 8B model should cost on a GPU."
    )
    p.add_argument("--hardware", choices=sorted(COPIES), default="h100", help="(default h100)")
    p.add_argument("--launch", type=float, default=1e6 * LAUNCH, help="microseconds a launch (default 1.75)")
    p.add_argument("--context", type=int, default=CONTEXT, help="committed tokens (default 1024)")
    p.add_argument("--json", action="store_true", help="the costs as one JSON object in the last line")
    return p


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.launch < 0 or args.context < 1:
        raise ValueError("--launch must not be negative, and --context must be at least 1")
    costs = costs_of(args.hardware, 1e-6 * args.launch, args.context)
    rate = f"{COPIES[args.hardware] / 1e12:g} TB/s, {args.launch:g} us a launch"
    out = console(140)
    out.print(launch_table(args.context))
    out.print(cost_table(costs, args.context, f"{SHAPE} behind {args.context} tokens on one {args.hardware}: {rate}"))
    if args.json:
        rounds = {"plain": None} | {str(tree): tree for tree in TREES}
        parts = {name: costs.parts(tree, args.context) for name, tree in rounds.items()}
        told = {name: {part: cost._asdict() for part, cost in found.items()} for name, found in parts.items()}
        at = {"hardware": args.hardware, "launch_us": args.launch, "context": args.context}
        print(json.dumps(at | {"rounds": told}))


if __name__ == "__main__":
    main()
