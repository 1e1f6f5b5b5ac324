"""What a round costs as it is replayed, in the shape of a real model: its parts alone, all of it, and the loop around.

    python -m specdec.lab.bench.replayed_rounds --shape llama_3_1_8b --device cuda --out rounds.json

Weights are random, and rounds emit `--tau` tokens whatever is drafted (`lab.bench.simulated_tau`): times are measured,
and the speed-up is SIMULATED. On a GPU every part is captured as a CUDA graph of its own, so no part's time includes
launches from Python; on the CPU parts are called. Plain decoding is compared with the bandwidth that is measured here.

Writes one JSON file, again after each part; the last line of the output is the same object.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec import registry
from specdec.cli.errors import one_sentence_errors
from specdec.contracts import DraftState
from specdec.engine.batch import Batch
from specdec.engine.clock import SilentClock
from specdec.engine.engine import Engine
from specdec.engine.executor import buckets
from specdec.engine.round import Round, RoundSettings
from specdec.engine.sequence import Sequence
from specdec.lab.bench.bench import random_prompts
from specdec.lab.bench.memory import Run, bandwidth, captured, device_seconds, read_bytes
from specdec.lab.bench.shapes import random_head, random_target
from specdec.lab.bench.simulated_tau import MARK, SimulatedTau
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts
from specdec.lab.output import Report
from specdec.model.checkpoint import check_device, choose_dtype
from specdec.structs import DraftTree, Sampling, Verdict
from specdec.trees.spec import make_tree

NODES = (1, 8, 16, 32)  # forwards that are timed next to that of the tree
ROOM = 64  # tokens after the context
L2_SWEEP = 1 << 28  # bytes
PARTS = ("draft", "verify", "rule", "commit", "extend")


class Scene:
    """A round that can be played repeatedly: one row of `prompt`, which is in the caches."""

    def __init__(self, target, drafter, tree, verifier, prompt: list[int]):
        self.target, self.drafter, self.tree, self.verifier, self.prompt = target, drafter, tree, verifier, prompt
        self.round, self.plain_round = Round(target, drafter, tree, verifier), Round(target, None, None, verifier)
        room = len(prompt) + ROOM
        batch = Batch(self.round, 1, room, SilentClock(), overlap=True, compact=False)
        batch.admit([Sequence(prompt, ROOM)])
        self.root, self.state, self.cache = batch.tensors.root, batch.tensors.state, batch.cache
        self.settings = RoundSettings(Sampling(), self.round.noise([(0, 0)]), SilentClock())
        self.active = torch.ones(1, dtype=torch.bool, device=target.device)
        self.lens = [(cache, cache.lens.clone()) for cache in (self.cache, drafter.cache) if cache is not None]
        self.bucket = next(size for size in buckets(room) if size >= len(prompt))

    def reset(self) -> None:
        """As it was before the round; on the device this is one small copy a cache."""
        for cache, lens in self.lens:
            cache.lens.copy_(lens)
            cache.max_len = self.bucket

    # The parts of a round, and what they leave to the next one

    def draft(self) -> DraftTree:
        self.reset()
        return self.tree.grow(self.drafter, self.root, self.state)

    @cached_property
    def grown(self) -> DraftTree:
        return self.draft()

    def verify(self) -> tuple[Tensor, Tensor | None]:
        self.reset()
        tree = self.grown
        return self.target(tree.tokens, self.cache, depth=tree.depth, ancestors=tree.ancestors, taps=self.drafter.taps)

    @cached_property
    def verified(self) -> tuple[Tensor, Tensor | None]:
        return self.verify()

    def rule(self) -> Verdict:
        return self.verifier(self.grown, self.verified[0], Sampling())

    @cached_property
    def verdict(self) -> Verdict:
        return self.rule()

    def commit(self) -> None:
        self.reset()
        self.cache.commit(self.verdict.path, self.verdict.n, self.bucket + self.round.path)

    def extend(self) -> DraftState:
        self.reset()
        verified: Any = self.verified
        (_, feats), path = verified, self.verdict.path
        feats = feats.gather(1, path[..., None].expand(-1, -1, feats.shape[-1]))
        return self.drafter.extend(feats, self.verdict.tokens, self.verdict.n, self.bucket + self.round.path)

    def play(self) -> None:
        self.reset()
        self.round.play(self.root, self.state, self.cache, self.active, self.settings)

    def plain(self) -> None:
        self.reset()
        self.plain_round.play(self.root, None, self.cache, self.active, self.settings, self.active.view(1, 1, 1))

    def forward(self, nodes: int) -> Run:
        """The target over a chain of so many nodes."""
        tokens = self.root[:, None].repeat(1, nodes)
        ancestors = torch.ones(1, nodes, nodes, dtype=torch.bool, device=tokens.device).tril()
        depth = torch.arange(nodes, device=tokens.device)[None]

        def run() -> None:
            self.reset()
            self.target(tokens, self.cache, depth=depth, ancestors=ancestors, taps=self.drafter.taps)

        return run


def measure_parts(report: Report, scene: Scene, ceiling: float, trials: int) -> None:
    """Plain decoding, forwards by nodes, and the round by part, each from a graph of its own.

    A time is the median of a part on the device. Before each replay the L2 cache is overwritten, as other parts do.
    """
    device = scene.target.device
    sweep = torch.empty(L2_SWEEP if device.type == "cuda" else 1, dtype=torch.int8, device=device)

    def time(run: Run) -> float:
        run()  # what it takes from other parts is made outside of its graph
        return 1e3 * device_seconds(captured(run, device), device, trials, before=sweep.zero_)

    def plain() -> dict:
        ms, moved = time(scene.plain), read_bytes(scene.target, len(scene.prompt))
        return {"ms": ms, "bytes": moved, "share_of_bandwidth": 1e3 * moved / ms / ceiling}

    def forward(nodes: int) -> dict:
        ms = time(scene.forward(nodes))
        return {"ms": ms} | ({"in_plain_tokens": ms / token} if token else {})

    def timed(run: Callable[[], object]) -> dict:
        return {"ms": time(run)}

    token = report.add("plain", plain).get("ms")
    for nodes in (*(n for n in NODES if n < scene.round.nodes), scene.round.nodes):
        report.add(f"forward of {nodes}", partial(forward, nodes))
    for name, run in ({part: getattr(scene, part) for part in PARTS} | {"round": scene.play}).items():
        report.add(name, partial(timed, run))


def measure_loops(report: Report, scene: Scene, new: int, trials: int) -> None:
    """Whole decodings, which take turns: plainly, speculatively, and with an observer that reads all fields."""
    plain, fast = Engine(scene.target), Engine(scene.target, scene.drafter, scene.tree, scene.verifier)
    ways = {"plain loop": (plain, None), "loop": (fast, None), "observed loop": (fast, lambda report: None)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}  # ms of a round, and tokens/s

    def decode(name: str) -> dict:
        engine, observer = ways[name]
        for _ in range(1 if found[name] else 2):  # the first captures, and loads what libraries need
            result = engine.generate([scene.prompt], max_new_tokens=new, eos=frozenset(), observer=observer)
        trace, seconds = result.rows[0].trace, result.decode_seconds
        found[name].append((1e3 * seconds / trace.rounds, sum(trace.emitted) / seconds))
        ms, rate = map(statistics.median, zip(*found[name], strict=True))
        ratio = {"to_plain": rate / statistics.median(r for _, r in found["plain loop"])} if found["plain loop"] else {}
        return {"round_ms": ms, "tokens_per_second": rate} | ratio

    for _ in range(trials):
        for name in ways:
            report.add(name, partial(decode, name))


# Settings that are numbers: the default, and what they are
FLAGS = {
    "topk": (10, None),
    "steps": (8, None),
    "num_draft_tokens": (60, None),
    "tau": (3.0, "tokens that every round emits"),
    "context": (1024, "tokens of the prompt"),
    "new_tokens": (192, "of a decoding"),
    "trials": (20, "replays of each part; decodings are a fourth of that"),
    "seed": (0, None),
}


@one_sentence_errors
@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama_3_1_8b", help="a name of conf/shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    for name, (default, words) in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=words)
    parser.add_argument("--out", type=Path, default=Path("rounds.json"))
    args = parser.parse_args()
    check_counts(args, "context", "new_tokens", "trials")
    device, shape = check_device(args.device), registry.settings("shape", args.shape)
    tree, verifier = make_tree(args.topk, args.steps, args.num_draft_tokens), SimulatedTau(args.tau)
    verifier.check(tree.steps)
    dtype = choose_dtype(args.dtype, shape["config"], device)
    target = random_target(shape["config"], f"{shape['name']}, random weights", dtype, device, args.seed)
    drafter = random_head(target, **shape["drafter"], seed=args.seed)
    title = f"{MARK} tau {args.tau:g}: {target.name}, {str(dtype).removeprefix('torch.')}, {device}"
    head = {"benchmark": title, "simulated": True} | provenance(device)
    head |= {"settings": {name: str(value) for name, value in vars(args).items()}}
    ceiling = bandwidth(device)
    report = Report(args.out, head | {"bandwidth_bytes_per_second": ceiling})
    prompt = random_prompts(target.vocab, 1, args.seed)(0, args.context)[0]
    scene = Scene(target, drafter, tree, verifier, prompt)
    measure_parts(report, scene, ceiling, args.trials)
    measure_loops(report, scene, args.new_tokens, max(1, args.trials // 4))
    print(json.dumps(report.content))


if __name__ == "__main__":
    main()
