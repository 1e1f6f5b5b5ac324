"""The noise of a token, by the keys of its row and position.

`sampling.noise` has the formula and its sources, and the same bits in torch. This file is no kernel by itself.
"""

import triton
import triton.language as tl


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
    """Return 32 random bits, uint32, for tokens and the halves a, b of a key."""
    x = _second(_first((token + 1).to(tl.uint32)))
    return _second(_first(x ^ a.to(tl.uint32)) ^ b.to(tl.uint32))


@triton.jit
def exponential(token, a, b):
    """Return the e of `sampling.noise`."""
    u = (noise_bits(token, a, b) & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    u = u * 4.6566125955216364e-10 + 2.3283064365386963e-10
    # -log(1 - u), by its series where the subtraction would lose digits
    return tl.where(u < 0.004, u * (1.0 + u * (0.5 + u * 0.3333333)), -tl.log(1.0 - u))
