"""A roofline: what forwards and rounds cost on hardware that is given by numbers. Formulas, no measurement.

A forward of R = B n rows over contexts of C tokens takes, with W the bytes of the weights that it reads,

    max((W + logits) / bandwidth, 2 (W / bytes per weight) R / flops)    linear maps: all weights once
  + max(B C kv / bandwidth, 4 layers heads Dh C R / flops)               attention: keys and values once per sequence
  + launches * launch                                                    the least time that a kernel takes

This is the roofline of Williams et al. (CACM 2009) for each of the two. A plain token is a forward with n = 1. A round
is the target's forward with n = N, steps - 1 forwards of a one-layer drafter with n = topk, one with n = steps + 1 that
absorbs what was accepted, small operators around them, and one reading by the host. How many kernels are launched is
counted (`lab.cost.launches`). Nothing overlaps, nothing is quantised, and there is one device. What lies between two
layers is small and taken to stay in the device's cache. Bandwidth and FLOP/s are the vendor's peaks times the shares
that kernels are assumed to reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specdec.lab.cost.model import Costs
from specdec.trees.spec import TreeSpec


@dataclass(frozen=True)
class Hardware:
    """A device. Peaks: bandwidth in bytes/s, flops in dense 16-bit FLOP/s, memory in bytes; launch in s a kernel."""

    bandwidth: float
    flops: float
    memory: float
    launch: float = 2e-6  # within a CUDA graph; some 5e-6 without
    bandwidth_share: float = 0.8  # of the peak, reached
    flops_share: float = 0.6


# From NVIDIA's data sheets: dense bf16 with fp32 accumulation.
HARDWARE = {
    "h100": Hardware(3.35e12, 989e12, 80e9),  # SXM
    "h200": Hardware(4.8e12, 989e12, 141e9),
    "a100": Hardware(2.04e12, 312e12, 80e9),  # SXM, 80 GB
    "4090": Hardware(1.01e12, 165e12, 24e9),
}


@dataclass(frozen=True)
class ForwardShape:
    """What a forward of a model reads and computes. `weights` leaves the embedding out: only rows of it are read."""

    weights: float  # parameters
    layers: int
    kv: float  # elements that one token adds to the cache
    heads_dim: int  # query heads * head size
    bytes_each: float = 2.0
    head: float = 0.0  # of a drafter's weights those that only guessing reads, and
    entry: float = 0.0  # those that only absorbing reads
    vocab: int = 0  # logits that a row makes, where they are written to memory

    @property
    def bytes(self) -> float:
        return self.weights * self.bytes_each


def decoder(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> ForwardShape:
    """A dense decoder, from the numbers of its config."""
    attention = hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    weights = layers * (attention + 3 * hidden * intermediate) + vocab * hidden
    return ForwardShape(weights, layers, 2 * layers * kv_heads * head_dim, heads * head_dim, vocab=vocab)


def eagle3_of(
    hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, draft_vocab: int
) -> ForwardShape:
    """An EAGLE-3 head for such a decoder: `fc` over three taps, a layer that reads two inputs side by side, a head."""
    one = decoder(1, hidden, intermediate, heads, kv_heads, head_dim, draft_vocab)
    second, entry = hidden * (heads + 2 * kv_heads) * head_dim, 3 * hidden * hidden
    weights = one.weights + second + entry
    return replace(one, weights=weights, head=draft_vocab * hidden, entry=entry, vocab=0)


CONFIGS = {
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.3-70b": (80, 8192, 28672, 64, 8, 128, 128256),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936),
}


@dataclass(frozen=True)
class RoundLaunches:
    """Kernels of a round by part, as `lab.cost.launches` counts them; of a plain round those of the drafter are 0."""

    layer: int  # a layer of the target
    target: int  # the target's forward besides
    verification: int
    commit: int
    settle: int  # which rows go on, and copies to where the next round finds the results
    root: int = 0
    level: int = 0
    selection: int = 0
    absorb: int = 0


PLAIN, CHAIN, TREE = "plain", "chain", "tree"  # the kinds of rounds


class PartCost(NamedTuple):
    """What a part of a round moves, computes and launches, and the seconds that it takes then."""

    bytes: float
    flops: float
    launches: float
    seconds: float


@dataclass(frozen=True)
class Roofline(Costs):
    """`Costs` by the formulas of this module."""

    hardware: Hardware
    target: ForwardShape
    drafter: ForwardShape
    launches: Mapping[str, RoundLaunches]  # by kind of round
    host: float = 30e-6  # one reading of the emitted tokens

    def plain(self, context: np.ndarray, batch: float = 1) -> np.ndarray:
        return sum(part.seconds for part in self.parts(None, context, batch).values()) + self.host

    def round(self, tree: TreeSpec, context: np.ndarray, batch: float = 1) -> np.ndarray:
        return sum(part.seconds for part in self.parts(tree, context, batch).values()) + self.host

    def parts(self, tree: TreeSpec | None, context: np.ndarray, batch: float = 1) -> dict[str, PartCost]:
        """The parts of a round; tree None: of a plain one. The host's reading is not among them."""
        target, drafter = self.target, self.drafter
        many = self.launches[PLAIN if tree is None else CHAIN if tree.topk == 1 and not tree.file else TREE]
        nodes, steps = (1, 0) if tree is None else (tree.num_draft_tokens, tree.steps)
        logits = nodes * batch * target.vocab * target.bytes_each
        moved = 2 * steps * batch * target.kv * target.bytes_each  # of `steps` tokens, read and written, at most
        parts = {}
        if tree is not None:
            alone = replace(drafter, weights=drafter.head, kv=0, heads_dim=0)
            level = replace(drafter, weights=drafter.weights - drafter.entry)
            levels = self.forward(level, tree.topk, context, batch, many.level)
            parts["root"] = self.forward(alone, 1, context, batch, many.root)
            parts["draft levels"] = PartCost(*(value * (steps - 1) for value in levels))
            parts["selection"] = self._small(0, many.selection)
        whole = many.target + target.layers * many.layer
        parts["target"] = self.forward(target, nodes, context, batch, whole)
        parts["verification"] = self._small(logits, many.verification)
        parts["commit"] = self._small(moved, many.commit)
        if tree is not None:
            entering = replace(drafter, weights=drafter.weights - drafter.head)
            parts["absorb"] = self.forward(entering, steps + 1, context, batch, many.absorb)
        return parts | {"settle": self._small(0, many.settle)}

    def forward(
        self, shape: ForwardShape, nodes: float, context: np.ndarray, batch: float, launches: float
    ) -> PartCost:
        """A forward of `nodes` rows for each of `batch` sequences."""
        bandwidth, flops = self._rates()
        rows, context = nodes * batch, np.asarray(context, dtype=float)
        weights = shape.bytes + rows * shape.vocab * shape.bytes_each
        products = 2 * shape.weights * rows
        read = batch * context * shape.kv * shape.bytes_each
        attention = 4 * shape.layers * shape.heads_dim * context * rows
        seconds = max(weights / bandwidth, products / flops) + np.maximum(read / bandwidth, attention / flops)
        return PartCost(weights + read, products + attention, launches, seconds + launches * self.hardware.launch)

    def _small(self, moved: float, launches: float) -> PartCost:
        """A part that does no arithmetic to speak of."""
        return PartCost(moved, 0.0, launches, moved / self._rates()[0] + launches * self.hardware.launch)

    def _rates(self) -> tuple[float, float]:
        """Bytes/s and FLOP/s that are reached."""
        h = self.hardware
        return h.bandwidth * h.bandwidth_share, h.flops * h.flops_share

    def empty(self, tree: TreeSpec, context: np.ndarray, batch: float = 1) -> np.ndarray:
        return self.plain(context, batch) + self.forward(self.drafter, 1, context, batch)

    def fits(self, context: float, batch: float) -> bool:
        """Do weights (but for the embedding) and caches fit into the memory?"""
        caches = sum(batch * context * s.kv * s.bytes_each for s in (self.target, self.drafter))
        return self.target.bytes + self.drafter.bytes + caches <= self.hardware.memory
