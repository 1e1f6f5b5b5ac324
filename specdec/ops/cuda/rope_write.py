"""The norms of q and k, their rotary positions, and the write of k and v to the cache, in one pass.

    turn(x) = x * cos + roll(x, Dh/2) * sin       sin with its first half negated, as `rope.RopeTable` has it
    q_out[r,h] = turn(norm_q(q[r,h]))
    keys[slots[r],h] = turn(norm_k(k[r,h]))       values[slots[r],h] = v[r,h]

In torch: `ops.rope_write.rotate` and `KVCache.write`, after `ops.rms_norm` in families that have such norms. A row
whose slot is negative is padding, and writes nothing to the cache. Each warp has one head of a row. Results are rounded
once, at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.cuda.rms_norm import scaled


@triton.jit
def _rope_write(
    qkv, cos, sin, gains, slots, q_out, keys, values, qkv_row, table_row, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, HALF)
    mask = columns < DIM // 2
    x = qkv + row * qkv_row + head * DIM
    low = tl.load(x + columns, mask=mask, other=0.0)
    high = tl.load(x + DIM // 2 + columns, mask=mask, other=0.0)
    if head < Q_HEADS + KV_HEADS:
        dtype = qkv.dtype.element_ty
        low32, high32 = low.to(tl.float32), high.to(tl.float32)
        if NORM:
            gain = gains + tl.where(head < Q_HEADS, 0, DIM) + columns
            inverse_rms = tl.rsqrt((tl.sum(low32 * low32, 0) + tl.sum(high32 * high32, 0)) / DIM + eps)
            low_gain = tl.load(gain, mask=mask, other=0.0).to(tl.float32)
            high_gain = tl.load(gain + DIM // 2, mask=mask, other=0.0).to(tl.float32)
            low32 = scaled(low32, inverse_rms, low_gain, dtype, OFFSET).to(tl.float32)
            high32 = scaled(high32, inverse_rms, high_gain, dtype, OFFSET).to(tl.float32)
        table = row * table_row + columns
        low_cos = tl.load(cos + table, mask=mask, other=0.0).to(tl.float32)
        high_cos = tl.load(cos + table + DIM // 2, mask=mask, other=0.0).to(tl.float32)
        low_sin = tl.load(sin + table, mask=mask, other=0.0).to(tl.float32)
        high_sin = tl.load(sin + table + DIM // 2, mask=mask, other=0.0).to(tl.float32)
        low = (low32 * low_cos + high32 * low_sin).to(dtype)
        high = (high32 * high_cos + low32 * high_sin).to(dtype)
    if head < Q_HEADS:
        out = q_out + (row * Q_HEADS + head) * DIM + columns
        tl.store(out, low, mask=mask)
        tl.store(out + DIM // 2, high, mask=mask)
    else:
        cache, place = keys, head - Q_HEADS
        if head >= Q_HEADS + KV_HEADS:
            cache, place = values, head - Q_HEADS - KV_HEADS
        slot = tl.load(slots + row)
        out = cache + (slot * KV_HEADS + place) * DIM + columns
        tl.store(out, low, mask=mask & (slot >= 0))
        tl.store(out + DIM // 2, high, mask=mask & (slot >= 0))


def launch(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    gains: Tensor | None = None,
    eps: float = 0.0,
    offset: bool = False,
) -> Tensor:
    """Norm and rotate q and k, write k and v to the cache, and return q [B,n,heads,Dh].

    qkv [B*n,heads+2K,Dh], the heads of a row together; cos, sin [B,n,1,Dh] of equal strides; slots [B*n] int64, into
    the rows of keys and values [slots,K*Dh]. gains [2,Dh]: weights of the norms of q and k, None for no norms;
    `offset` adds 1 to them.
    """
    rows, heads, dim = qkv.shape
    batch, cos, sin = len(cos), cos.flatten(0, 2), sin.flatten(0, 2)
    kv_heads = keys.shape[1] // dim
    q_heads = heads - 2 * kv_heads
    assert qkv.stride()[1:] == (dim, 1)
    assert keys.stride() == values.stride() == (kv_heads * dim, 1)
    assert cos.stride() == sin.stride()
    assert cos.stride(1) == 1
    q = torch.empty(rows, q_heads, dim, dtype=qkv.dtype, device=qkv.device)
    _rope_write[(rows, heads)](
        qkv, cos, sin, cos if gains is None else gains, slots, q, keys, values, qkv.stride(0), cos.stride(0), eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2),
        NORM=gains is not None, OFFSET=offset, num_warps=1,
    )  # fmt: skip
    return q.unflatten(0, (batch, -1))
