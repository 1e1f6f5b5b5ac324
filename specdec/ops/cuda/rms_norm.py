"""RMSNorm of rows, and the sum with a residual and its RMSNorm in one pass.

    y = x / sqrt(mean(x^2) + eps) * weight             Llama: rounded to the dtype before the weight
    y = x / sqrt(mean(x^2) + eps) * (1 + weight)       Gemma (`offset`): rounded once, at the end
    s = x + residual, y as above of s                  s rounded to the dtype first, as an eager sum is

In torch: `ops.rms_norm.reference`. Statistics are in fp32. A row is read once and stays in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scaled(x, inverse_rms, weight, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """The norm of fp32 values x that were read as `dtype`, rounded at the places where the model families round."""
    if OFFSET:
        return (x * inverse_rms * (1.0 + weight)).to(dtype)
    return ((x * inverse_rms).to(dtype).to(tl.float32) * weight).to(dtype)


@triton.jit
def _rms_norm(
    x, residual, weight, total, y, stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    dtype = y.dtype.element_ty
    value = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value = value + tl.load(residual + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(dtype)
        tl.store(total + row * SIZE + columns, rounded, mask=mask)
        value = rounded.to(tl.float32)
    gain = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    tl.store(y + row * SIZE + columns, scaled(value, inverse_rms, gain, dtype, OFFSET), mask=mask)


def launch(
    x: Tensor, weight: Tensor, eps: float, offset: bool = False, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the norm of x [...,H]; with a residual of the same shape, x + residual and the norm of that."""
    rows = x.reshape(-1, x.shape[-1])
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    size = rows.shape[1]
    assert rows.stride(1) == 1
    block = triton.next_power_of_2(size)
    _rms_norm[(len(rows),)](
        rows, y if residual is None else residual.contiguous(), weight, total, y, rows.stride(0), eps,
        SIZE=size, BLOCK=block, ADD=residual is not None, OFFSET=offset, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return y if residual is None else (total, y)
