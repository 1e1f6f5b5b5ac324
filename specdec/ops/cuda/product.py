"""The matrix product inside the kernels: operands in their dtype, sums in fp32. This file is no kernel by itself."""

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
