"""Attention of a few new positions over a cache, and of prompts over themselves.

On the CPU, torch's attention needs a mask over all slots and the query heads of a key head packed, and copies for that.
Our own operators (`cpu/attention.h`) read lengths and ancestors as they are, in fp32. For up to 64 positions they take
a third to nine tenths of the time (docs/log.md). The result of a position has the same bits whatever is next to it.

Of a few positions the calls take as long as what they compute. So the products around attention, the rotation, the
write to the cache and the norm that follows are one call where all of them are our own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops import Matrix, Norm, kernel_for, native
from specdec.ops.linear import inputs_of, packed_rows
from specdec.ops.rope_write import head_gains

FEW = 64  # positions of a row; from about so many on torch's matrix products are faster
DIMS = (16, 32, 64, 80, 96, 128, 256)  # of a head


class Seen(NamedTuple):
    """What the last n of `nodes` scratch slots see, for our own operators."""

    lens: Tensor  # [B] committed slots: all of them
    ancestors: Tensor | None  # [B,n,nodes] bool: the scratch slots that each of them sees; None: all up to itself
    nodes: int
    scale: float  # of scores


def tree_attention(
    memory: Tensor, lens: Tensor, places: Tensor, n: int, nodes: int, ancestors: Tensor | None, depth: Tensor | None,
    bound: int, groups: int, window: int | None, scale: float | None, exact: bool = False,
) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Seen | None]:  # fmt: skip
    """Return the attention of n new positions as a function, and what our own operators take of the positions.

    The function takes q [B,n,heads,Dh] and keys and values [B,K,S,Dh], and returns [B,n,heads*Dh]. The second result is
    None where our own operators do not serve.

    memory [2,B,S,K,Dh]: keys and values of a layer. lens [B]: committed slots. places: 0 to S - 1, of which the last n
    before `nodes`, the number of scratch slots in use, are those of the positions. bound: at least the largest of lens,
    with `exact` the length of the only row. ancestors, depth, groups, window, scale: see `CacheView`.
    """
    _, batch, slots, _, dim = memory.shape
    if kernel := kernel_for("tree_attention", memory):
        how: dict[str, Any] = {"depth": None if ancestors is None else depth, "window": window, "scale": scale}
        return lambda q, keys, values: kernel(q, keys, values, lens, ancestors, nodes, slots=bound, **how), None
    if window is None and n <= FEW and dim in DIMS and native.serves(memory):
        seen = Seen(lens, ancestors, nodes, dim**-0.5 if scale is None else scale)
        operator = native.operator("tree_attention")
        return lambda q, keys, values: operator(q, keys, values, *seen), seen
    first, visible, mask = 0, min(bound + nodes, slots), None
    if exact and n == 1 and ancestors is None and batch == 1:
        first = visible - (window or visible)
    else:
        own = places[nodes - n : nodes]
        if ancestors is None:  # all before itself, and itself
            mask = torch.arange(visible, device=lens.device) <= (lens[:, None] + own)[..., None]
        else:
            mask = tree_mask(lens, ancestors, visible)
        if window is not None:
            if depth is None:
                raise ValueError("attention in a window needs the depth of the positions")
            mask &= window_mask(lens, depth, visible, window)
        mask = packed_mask(mask, groups, memory.dtype)
    count = visible - first

    def plain(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(q, keys.narrow(2, first, count), values.narrow(2, first, count), mask, scale)

    return plain, None


def attend_add(
    qkv: Matrix, o: Matrix, q_norm: Norm | None, k_norm: Norm | None, norm: Norm
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the function (residual, x, rope, slots, flat, heads, seen) -> residual + attention(x), and its norm.

    All of it is one call; None if not all of it is our own. flat, heads: a layer of a `KVCache`. seen: from
    `tree_attention`.
    """
    weight = qkv.weight
    others = norm.offset or kernel_for("rope_write", weight) or kernel_for("rms_norm", weight)
    if others or qkv.bias is not None or o.bias is not None or not native.serves(weight):
        return None
    into, out = (packed_rows(linear.weight, linear.int8) for linear in (qkv, o))
    if into is None or out is None:
        return None
    own = native.operator("attend_add")
    last = *head_gains(q_norm, k_norm), norm.weight, norm.eps
    return lambda residual, x, rope, slots, flat, heads, seen: own(
        residual, x, into, out, *rope, slots, *flat, *heads, *seen, *last
    )


@native.seen_as("specdec_rows.attend_add.default")
def _seen(
    residual: Tensor, x: Tensor, qkv: Tensor, o: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, flat_keys: Tensor,
    flat_values: Tensor, keys: Tensor, values: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the call by its parts, for Inductor."""
    *seen, gains, gain_eps, weight, eps = rest
    ops, dim, width = torch.ops.specdec_rows, keys.shape[3], inputs_of(o)
    rows = ops.linear(x, qkv, width + 2 * keys.shape[1] * dim).view(len(x), -1, dim)
    q = ops.rope_write(rows, cos, sin, slots, flat_keys, flat_values, gains, gain_eps)
    out = ops.tree_attention(q, keys, values, *seen).view(len(x), width)
    return ops.add_norm(residual, ops.linear(out, o, residual.shape[1]), weight, eps)


def tree_mask(lens: Tensor, ancestors: Tensor, slots: int) -> Tensor:
    """Key slot s is visible to node i iff s < lens or ancestors[i, s - lens].

    lens [B], ancestors [B,N,M] (bool, M scratch slots) -> [B,N,slots] bool.
    """
    b, n, m = ancestors.shape
    slot, end = torch.arange(slots, device=lens.device), lens[:, None]
    committed = (slot < end)[:, None].expand(b, n, slots)
    scratch = (end + slot[:m]).clamp_(max=slots - 1)  # a finished row may lie after all slots
    return committed.scatter(2, scratch[:, None].expand(b, n, m), ancestors)


def window_mask(lens: Tensor, depth: Tensor, slots: int, window: int) -> Tensor:
    """Key slot s is at most window - 1 positions before node i: lens [B], depth [B,N] -> [B,N,slots] bool.

    A committed slot holds its own position, node j's slot the position lens + depth[j].
    """
    offset = torch.arange(slots, device=lens.device) - lens[:, None]  # [B,S]
    tree_depth = depth.gather(1, offset.clamp(0, depth.shape[1] - 1))
    position = torch.where(offset < 0, offset, tree_depth)  # counted from lens
    return position[:, None] > depth[..., None] - window


def packed_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return what a mask [B,N,S] bool adds to scores, [B,1,groups*N,S]: 0 where visible, else -inf.

    It is the same for each of the query heads that share a key head. Given a bool mask, torch's attention makes this
    anew in every layer.
    """
    added = torch.full(mask.shape, -torch.inf, dtype=dtype, device=mask.device).masked_fill_(mask, 0.0)
    return torch.cat([added] * groups, 1).unsqueeze(1)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Return the attention of q [B,N,heads,Dh] over keys and values [B,K,S,Dh], as [B,N,heads*Dh].

    mask [B,1,groups*N,S], from `packed_mask`, or None if every slot is visible to every node. The query heads that
    share a key head are packed along the node axis, so keys and values are never repeated. scale multiplies the
    products of q and keys; None is Dh ** -0.5.
    """
    b, n, heads, dim = q.shape
    kv_heads = keys.shape[1]
    if n == 1:  # the same as below without five views, which take as long as the attention itself on the CPU
        q = q.view(b, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(b, 1, heads * dim)
    groups = heads // kv_heads
    packed = q.view(b, n, kv_heads, groups, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, groups * n, dim)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    return out.view(b, kv_heads, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(b, n, heads * dim)


def shares_key_heads(q: Tensor, masked: bool) -> bool:
    """Does torch's attention take queries [...,Dh] that share key heads without holding all their scores?

    On a GPU only flash attention does, and it takes neither fp32 nor a mask nor wide heads. For the others torch falls
    back to plain attention (https://github.com/pytorch/pytorch/pull/181528), so keys and values are repeated there.
    """
    return not q.is_cuda or not (masked or q.dtype == torch.float32 or q.shape[-1] > 256)


def attend_grouped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return torch's attention of q [B,heads,N,Dh] over k and v [B,K,S,Dh], heads/K query heads to a key head."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and not shares_key_heads(q, mask is not None):
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None) -> Tensor:
    """Self-attention of a fresh prompt: q [B,T,heads,Dh], k and v [B,T,K,Dh] -> [B,T,heads*Dh].

    With a window a position sees itself and the window - 1 before it.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    length = q.shape[2]
    if window is None or window >= length:
        return attend_grouped(q, k, v, causal=True, scale=scale).transpose(1, 2).flatten(2)
    pieces = []  # as many queries at once as the window is long, so that a mask never has T x T entries
    for start in range(0, length, window):
        first, end = max(0, start - window + 1), min(start + window, length)
        rows = torch.arange(start, end, device=q.device)[:, None]
        columns = torch.arange(first, end, device=q.device)
        mask = (columns <= rows) & (columns > rows - window)
        piece = q[:, :, start:end], k[:, :, first:end], v[:, :, first:end]
        pieces.append(attend_grouped(*piece, mask, scale=scale))
    return torch.cat(pieces, 2).transpose(1, 2).flatten(2)
