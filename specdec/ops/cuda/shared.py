"""What several kernels share: the matrix product, the noise of a token, and the number of parts of their work."""

import functools

import torch
import triton
import triton.language as tl
from triton import knobs

# Triton 3.7's interpreter multiplies the bit patterns of bf16 operands. Widened operands give the exact products.
WIDEN = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def product(a, b):
    """Return a [M,K] @ b [K,N] as [M,N] fp32; fp32 operands are not rounded to tf32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _first(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    return x ^ (x >> 15)


@triton.jit
def _second(x):
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_bits(token, a, b):
    """Return 32 random bits, uint32, for tokens and the halves a, b of a key of their row and position.

    `sampling.noise` has the formula and its sources, and the same bits in torch.
    """
    x = _second(_first((token + 1).to(tl.uint32)))
    return _second(_first(x ^ a.to(tl.uint32)) ^ b.to(tl.uint32))


@triton.jit
def exponential(token, a, b):
    """Return the e of `sampling.noise`."""
    u = (noise_bits(token, a, b) & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    u = u * 4.6566125955216364e-10 + 2.3283064365386963e-10
    # -log(1 - u), by its series where the subtraction would lose digits
    return tl.where(u < 0.004, u * (1.0 + u * (0.5 + u * 0.3333333)), -tl.log(1.0 - u))


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device: 132 on an H100, and 1 on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def part_count(pieces: int, fit: int, *most: int) -> int:
    """Return the number of parts of a piece: the largest power of two that exceeds none of `most`, and 1 at least.

    All parts of `pieces` pieces are no more than the `fit` programs that a device runs at once: those beyond would wait
    for a second wave.
    """
    return 1 << max(min(fit // max(pieces, 1), *most), 1).bit_length() - 1
