"""Rotary positions, and the pass that normalises and rotates queries and keys and stores keys and values.

`cuda/rope_write.py` has the formula.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.ops import Norm, kernel_for, native
from specdec.ops.rms_norm import seen_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B,N,heads,Dh] with tables [B,N,1,Dh] whose sin has its first half negated."""
    if native.serves(x) and x.stride(-1) == 1:
        return native.operator("rotate")(x, cos, sin)
    return turned(x, cos, sin)


@native.seen_as("specdec_rows.rotate.default")
def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `rotate` in torch's operators."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rope_write(weight: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Callable[..., Tensor] | None:
    """Return the function (rows, cos, sin, slots, keys, values) -> q that does it in one pass, as the kernel does.

    None if there is none for such weights. weight: that of q, k and v.
    """
    if kernel := kernel_for("rope_write", weight):
        if q_norm is None or k_norm is None:
            return kernel
        both, eps, offset = torch.stack([q_norm.weight, k_norm.weight]), q_norm.eps, q_norm.offset
        return lambda *what: kernel(*what, both, eps, offset)
    if not native.serves(weight):
        return None
    write, gains = native.operator("rope_write"), head_gains(q_norm, k_norm)
    return lambda *what: write(*what, *gains)


def head_gains(q_norm: Norm | None, k_norm: Norm | None) -> tuple[Tensor | None, float]:
    """Return what normalised queries, and keys, are multiplied by [2,Dh], and the norms' eps."""
    if q_norm is None or k_norm is None:
        return None, 0.0
    return torch.stack([q_norm.gain(), k_norm.gain()]), q_norm.eps


@native.seen_as("specdec_rows.rope_write.default")
def _seen(
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    gains: Tensor | None,
    eps: float,
) -> Tensor:
    (b, n, _, dim), heads = cos.shape, rows.shape[1]
    kv_heads = keys.shape[1] // dim
    q, k, v = rows.view(b, n, heads, dim).split_with_sizes([heads - 2 * kv_heads, kv_heads, kv_heads], 2)
    if gains is not None:
        q, k = (seen_norm(x, gain, eps) for x, gain in zip((q, k), gains.unbind(), strict=True))
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    keys.index_copy_(0, slots, k.reshape(len(slots), -1))
    values.index_copy_(0, slots, v.reshape(len(slots), -1))
    return q
