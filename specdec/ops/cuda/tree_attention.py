"""Attention of the nodes of a tree over the committed slots of a cache and over each other.

    out[b,i,h] = sum_s softmax_s(scale * q[b,i,h] . k[b,s]) v[b,s]    over the slots s that node i sees:
    s < lens[b]                 committed; with a window only those fewer than `window` positions before the node
    s = lens[b] + j             node j of the tree if it is an ancestor of i, or i itself

Flash-decoding (Dao et al. 2023): the committed slots of a row are cut into `splits` parts of equal length. The device
finds the lengths from lens[b], so ragged rows are balanced and the host reads no length. The program of the last part
continues with the tree itself, and reads its mask as it is. The programs keep an online softmax in fp32. If there are
several parts, a second kernel merges them by their log-sum-exps. The query heads that share a key head are packed with
the nodes into the rows of one tile, so every key is read once for all of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.cuda.shared import part_count, processors, product

LOG2E = tl.constexpr(1.4426950408889634)
LEAST_PART = 256  # slots of a part at least; merging shorter ones costs more than they gain
MOST_PARTS = 64  # which the merge reads at once
TILE_BYTES = 16384  # bytes of a tile of keys, or of values, or of queries at most
RESIDENT = 2  # programs that fit a multiprocessor: three stages of keys and values and the queries are 7 tiles
WIDE = 512  # bytes of a key; of wider ones a tile is larger, and one program fits


@triton.jit
def _absorb(q, k, v, visible, acc, peak, total, scale):
    """One step of the online softmax, in base 2, over keys and values [BLOCK,D]; rows see `visible` [ROWS,BLOCK]."""
    scores = product(q, tl.trans(k)) * scale
    scores = tl.where(visible, scores * LOG2E, -float("inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == -float("inf"), 0.0, higher)  # a row that has seen nothing yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    acc = acc * shrink[:, None] + product(weights.to(v.dtype), v)
    return acc, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def _load(keys, values, slots, held, kv_slot, DIM: tl.constexpr, D: tl.constexpr):
    """Keys and values [BLOCK,D] of slots [BLOCK], 0 where a slot is not `held`."""
    dims = tl.arange(0, D)
    at = slots.to(tl.int64)[:, None] * kv_slot + dims[None, :]
    mask = held[:, None] & (dims < DIM)[None, :]
    return tl.load(keys + at, mask=mask, other=0.0), tl.load(values + at, mask=mask, other=0.0)


@triton.jit
def _over_committed(
    q, keys, values, acc, peak, total, real, deep, length, split, splits, kv_slot, scale, window,
    DIM: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The online softmax over part `split` of the committed slots."""
    first = 0
    if WINDOW:
        first = tl.maximum(length - window + 1, 0)  # what the root sees; no node sees further back
    part = tl.cdiv(tl.cdiv(length - first, splits), BLOCK) * BLOCK
    start = first + split * part
    end = tl.minimum(start + part, length)
    for slot in range(start, end, BLOCK):
        slots = slot + tl.arange(0, BLOCK)
        held = slots < end
        k, v = _load(keys, values, slots, held, kv_slot, DIM, D)
        visible = real[:, None] & held[None, :]
        if WINDOW:
            visible = visible & (slots[None, :] > (length + deep - window)[:, None])
        acc, peak, total = _absorb(q, k, v, visible, acc, peak, total, scale)
    return acc, peak, total


@triton.jit
def _over_tree(
    q, keys, values, acc, peak, total, real, node, deep, length, ancestors, depth, n, nodes, see_node, kv_slot, scale,
    window, DIM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DEPTH: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """The online softmax over the scratch slots, 32 nodes at a time."""
    for first in range(0, nodes, 32):
        other = first + tl.arange(0, 32)
        held = other < nodes
        k, v = _load(keys, values, length + other, held, kv_slot, DIM, D)
        if CAUSAL:
            visible = (other[None, :] <= (nodes - n + node)[:, None]) & real[:, None] & held[None, :]
        else:
            at = ancestors + (node[:, None] * see_node + other[None, :])
            visible = tl.load(at, mask=real[:, None] & held[None, :], other=0) != 0
        if WINDOW:
            position = other
            if DEPTH:
                position = tl.load(depth + tl.minimum(other, n - 1), mask=held, other=0).to(tl.int32)
            visible = visible & (position[None, :] > (deep - window)[:, None])
        acc, peak, total = _absorb(q, k, v, visible, acc, peak, total, scale)
    return acc, peak, total


@triton.jit(
    do_not_specialize=["see_row", "see_node", "n", "nodes", "kv_heads", "window"],
    do_not_specialize_on_alignment=["ancestors"],
)
def _tree_attention(
    q, keys, values, lens, ancestors, depth, out, lse,
    q_row, q_node, q_head, kv_row, kv_head, kv_slot, see_row, see_node,
    n, nodes, kv_heads, scale, window,
    GROUPS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Attend from n new nodes, which are the last of `nodes` in the scratch slots.

    Strides: q_* of q, kv_* of keys and values, see_* of ancestors. PARTS: there are several, so what is written is
    merged afterwards.
    """
    row = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv = tl.program_id(1) % kv_heads
    split, splits = tl.program_id(2), tl.num_programs(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    node, head = rows // GROUPS, kv * GROUPS + rows % GROUPS
    real = node < n
    dims = tl.arange(0, D)
    length = tl.load(lens + row).to(tl.int32)
    deep = nodes - n + node  # positions count from `length`
    depth += row * n
    if DEPTH:
        deep = tl.load(depth + node, mask=real, other=0).to(tl.int32)
    q_at = q + row * q_row + node.to(tl.int64)[:, None] * q_node + head[:, None] * q_head + dims[None, :]
    tile = tl.load(q_at, mask=real[:, None] & (dims < DIM)[None, :], other=0.0)
    keys += row * kv_row + kv.to(tl.int64) * kv_head
    values += row * kv_row + kv.to(tl.int64) * kv_head
    acc = tl.zeros([ROWS, D], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, peak, total = _over_committed(
        tile, keys, values, acc, peak, total, real, deep, length, split, splits, kv_slot, scale, window,
        DIM, WINDOW, BLOCK, D,
    )  # fmt: skip
    if split == splits - 1:
        acc, peak, total = _over_tree(
            tile, keys, values, acc, peak, total, real, node, deep, length, ancestors + row * see_row, depth, n, nodes,
            see_node, kv_slot, scale, window, DIM, CAUSAL, WINDOW, DEPTH, D,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    query = (row * n + node) * (kv_heads * GROUPS) + head
    if PARTS:
        query = query * splits + split
        tl.store(lse + query, peak + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=real)
    at = out + query[:, None] * DIM + dims[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=real[:, None] & (dims < DIM)[None, :])


@triton.jit(do_not_specialize=["splits"])
def _merge(parts, lse, out, splits, DIM: tl.constexpr, S: tl.constexpr, D: tl.constexpr):
    """Merge parts [queries,splits,DIM] fp32, each normalised, by base-2 log-sum-exps into out [queries,DIM]."""
    query = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, S), tl.arange(0, D)
    weight = tl.load(lse + query * splits + split, mask=split < splits, other=-float("inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    at = parts + (query * splits + split)[:, None] * DIM + dims[None, :]
    part = tl.load(at, mask=(split < splits)[:, None] & (dims < DIM)[None, :], other=0.0)
    merged = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + query * DIM + dims, merged.to(out.dtype.element_ty), mask=dims < DIM)


def split_count(programs: int, slots: int, processors: int, resident: int = RESIDENT) -> int:
    """Return the number of parts of `slots` committed slots, a power of two, if one part of all rows takes `programs`.

    It aims at `resident` programs a multiprocessor, 264 on an H100, and never takes more. No part is below LEAST_PART.
    So a text that grows to any length changes the number a few times only.
    """
    return part_count(programs, resident * processors, slots // LEAST_PART, MOST_PARTS)


def _tile_sizes(queries: int, wide: int, itemsize: int) -> tuple[int, int]:
    """The rows of a tile of queries, if a key head has so many, and the slots of a tile of keys."""
    fit = max(16, TILE_BYTES // (wide * itemsize))
    # Products of fp32 operands run outside the tensor cores, and larger tiles of them do not fit the registers.
    rows = 16 if itemsize == 4 else min(64, fit, max(16, triton.next_power_of_2(queries)))
    return rows, min(128, fit)


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lens: Tensor,
    ancestors: Tensor | None,
    nodes: int,
    *,
    depth: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    slots: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Return the attention of q [B,n,heads,Dh] over keys and values [B,K,S,Dh], as [B,n,heads*Dh].

    Row b has lens[b] committed slots. The new positions are the last n of `nodes` in the scratch slots from lens[b] on.

    ancestors [B,n,nodes] bool: the scratch slots that each of them sees; None: all up to itself.
    depth [B,n]: their positions, counted from lens[b]; None: the order of the slots. It matters only with a window.
    Scratch slots before the new ones, if there are any, are assumed to be as deep as those.
    slots: a host-side bound of lens, from which the number of splits follows if `splits` is None.
    """
    b, n, heads, dim = q.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    assert keys.stride() == values.stride()
    assert keys.stride(3) == q.stride(3) == 1
    assert ancestors is None or ancestors.stride(2) == 1
    wide, windowed = max(16, triton.next_power_of_2(dim)), window is not None
    depth = depth.contiguous() if windowed and depth is not None else None
    rows, block = _tile_sizes(groups * n, wide, q.element_size())
    tiles = triton.cdiv(groups * n, rows)
    if splits is None:
        bound = keys.shape[2] if slots is None else slots
        seen, resident = min(bound, window or bound), RESIDENT if wide * q.element_size() <= WIDE else 1
        splits = split_count(tiles * b * kv_heads, seen, processors(q.device), resident)
    out = q.new_empty(b, n, heads * dim)
    parts = out if splits == 1 else q.new_empty(b, n, heads, splits, dim, dtype=torch.float32)
    lse = out if splits == 1 else q.new_empty(b, n, heads, splits, dtype=torch.float32)
    see = (lens, 0, 0) if ancestors is None else (ancestors, *ancestors.stride()[:2])
    _tree_attention[(tiles, b * kv_heads, splits)](
        q, keys, values, lens, see[0], lens if depth is None else depth, parts, lse, *q.stride()[:3],
        *keys.stride()[:3], *see[1:], n, nodes, kv_heads, dim**-0.5 if scale is None else scale,
        window or 0,
        GROUPS=groups, DIM=dim, PARTS=splits > 1, CAUSAL=ancestors is None, WINDOW=windowed,
        DEPTH=depth is not None, ROWS=rows, BLOCK=block,
        D=wide, num_warps=8 if q.element_size() == 4 else 4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _merge[(b * n * heads,)](
            parts, lse, out, splits, DIM=dim, S=triton.next_power_of_2(splits), D=wide, num_warps=4
        )
    return out
