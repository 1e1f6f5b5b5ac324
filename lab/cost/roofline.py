"""A roofline: what forwards and rounds cost on hardware that is given by numbers. Formulas, no measurement.

A forward of R = B n rows over contexts of C tokens takes, with W the bytes of the weights that it reads,

    max(W / bandwidth, 2 (W / bytes per weight) R / flops)                  linear maps: all weights once
  + max(B C kv / bandwidth, 4 layers heads Dh C R / flops)                  attention: keys and values once per sequence
  + kernels * launch                                                        the least time that a kernel takes

This is the roofline of Williams et al. (CACM 2009) for each of the two. A plain token is a forward with n = 1. A round
is the target's forward with n = N, steps - 1 forwards of a one-layer drafter with n = topk, one with n = steps + 1 that
absorbs what was accepted, small operators at every level, and one reading by the host. Nothing overlaps, nothing is
quantised, and there is one device. Bandwidth and FLOP/s are the vendor's peaks times the shares that kernels are
assumed to reach.
"""

from dataclasses import dataclass, replace

import numpy as np

from lab.cost.model import Costs
from trees.spec import TreeSpec


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

    @property
    def bytes(self) -> float:
        return self.weights * self.bytes_each


def decoder(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> ForwardShape:
    """A dense decoder, from the numbers of its config."""
    attention = hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    weights = layers * (attention + 3 * hidden * intermediate) + vocab * hidden
    return ForwardShape(weights, layers, 2 * layers * kv_heads * head_dim, heads * head_dim)


def eagle3_of(
    hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, draft_vocab: int
) -> ForwardShape:
    """An EAGLE-3 head for such a decoder: `fc` over three taps, a layer that reads two inputs side by side, a head."""
    one = decoder(1, hidden, intermediate, heads, kv_heads, head_dim, draft_vocab)
    more = hidden * (heads + 2 * kv_heads) * head_dim + 3 * hidden * hidden
    return replace(one, weights=one.weights + more)


CONFIGS = {
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.3-70b": (80, 8192, 28672, 64, 8, 128, 128256),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936),
}


@dataclass(frozen=True)
class Roofline(Costs):
    """`Costs` by the formulas of this module."""

    hardware: Hardware
    target: ForwardShape
    drafter: ForwardShape
    kernels_a_layer: int = 10
    kernels_a_level: int = 25  # the bookkeeping of a dynamic tree
    host: float = 30e-6  # one reading of the emitted tokens

    def forward(self, shape: ForwardShape, nodes: float, context: np.ndarray, batch: float) -> np.ndarray:
        """Seconds of one forward of `nodes` rows for each of `batch` sequences."""
        h, rows = self.hardware, nodes * batch
        bandwidth, flops = h.bandwidth * h.bandwidth_share, h.flops * h.flops_share
        context = np.asarray(context, dtype=float)
        linear = max(shape.bytes / bandwidth, 2 * shape.weights * rows / flops)
        read = batch * context * shape.kv * shape.bytes_each / bandwidth
        computed = 4 * shape.layers * shape.heads_dim * context * rows / flops
        return linear + np.maximum(read, computed) + self.kernels_a_layer * shape.layers * h.launch

    def plain(self, context: np.ndarray, batch: float = 1) -> np.ndarray:
        return self.forward(self.target, 1, context, batch) + self.host

    def round(self, tree: TreeSpec, context: np.ndarray, batch: float = 1) -> np.ndarray:
        level = self.forward(self.drafter, tree.topk, context, batch)
        absorb = self.forward(self.drafter, tree.steps + 1, context, batch)
        verify = self.forward(self.target, tree.num_draft_tokens, context, batch)
        small = tree.steps * self.kernels_a_level * self.hardware.launch
        return (tree.steps - 1) * level + absorb + verify + small + self.host

    def empty(self, tree: TreeSpec, context: np.ndarray, batch: float = 1) -> np.ndarray:
        return self.plain(context, batch) + self.forward(self.drafter, 1, context, batch)

    def fits(self, context: float, batch: float) -> bool:
        """Do weights (but for the embedding) and caches fit into the memory?"""
        caches = sum(batch * context * s.kv * s.bytes_each for s in (self.target, self.drafter))
        return self.target.bytes + self.drafter.bytes + caches <= self.hardware.memory
