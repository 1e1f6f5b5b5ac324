"""The RMSNorms of two inputs, side by side: what EAGLE-3 and MTP heads read.

    y = [x1 / rms(x1) * weight1, x2 / rms(x2) * weight2]        rms(x) = sqrt(mean(x^2) + eps)

In torch: two norms and a `cat` (`ops.rms_norm.norm_pair`). Rounded as `rms_norm` rounds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.cuda.rms_norm import scaled


@triton.jit
def _norm_pair(
    first, second, weight1, weight2, y, stride1, stride2, eps1, eps2, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x, gain, eps = first + row * stride1, weight1, eps1
    if side == 1:
        x, gain, eps = second + row * stride2, weight2, eps2
    value = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(gain + columns, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    out = scaled(value, inverse_rms, gain, y.dtype.element_ty, False)
    tl.store(y + (row * 2 + side) * SIZE + columns, out, mask=mask)


def launch(first: Tensor, second: Tensor, weights: tuple[Tensor, Tensor], eps: tuple[float, float]) -> Tensor:
    """Return the norms [...,2H] of first and second, [...,H] of one dtype, with weights [H] each."""
    size = first.shape[-1]
    assert first.shape == second.shape
    assert first.dtype == second.dtype
    sides = [x.reshape(-1, size) for x in (first, second)]
    y = torch.empty(*first.shape[:-1], 2 * size, dtype=first.dtype, device=first.device)
    block = triton.next_power_of_2(size)
    _norm_pair[(len(sides[0]), 2)](
        *sides, *weights, y, sides[0].stride(0), sides[1].stride(0), *eps, SIZE=size, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return y
