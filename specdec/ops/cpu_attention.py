"""Attention of few positions over a cache on the CPU, by our own operators, in fp32.

torch's attention wants a mask over all slots and the query heads of a key head packed, and copies for that. Ours
(`attention.h`) reads lengths and ancestors as they are. For up to 64 positions it takes a third to nine tenths of the
time (docs/log.md). Whatever is beside a position, its result has the same bits.

Of a few positions the calls take as long as what they compute. So the products around attention, the rotation, the
write to the cache and the norm behind them are one call where all of them are our own.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specdec.ops import native
from specdec.ops.linear import packed_rows

FEW = 64  # positions of a row; from about so many on torch's matrix products are faster
DIMS = (16, 32, 64, 80, 96, 128, 256)  # of a head


class Seen(NamedTuple):
    """What the last n of `nodes` scratch slots see."""

    lens: Tensor  # [B] committed slots: all of them
    ancestors: Tensor | None  # [B,n,nodes] bool: the scratch slots that each of them sees; None: all up to itself
    nodes: int
    scale: float  # of scores


def seen_by(
    memory: Tensor, lens: Tensor, n: int, nodes: int, ancestors: Tensor | None, scale: float | None
) -> Seen | None:
    """What our own operators are told of the last n of `nodes` scratch slots; None where they do not serve. memory
    [...,Dh]: a layer of the cache."""
    dim = memory.shape[-1]
    if n > FEW or dim not in DIMS or not native.serves(memory):
        return None
    return Seen(lens, ancestors, nodes, dim**-0.5 if scale is None else scale)


def attend_seen(q: Tensor, keys: Tensor, values: Tensor, seen: Seen) -> Tensor:
    """q [B,n,heads,Dh] over keys and values [B,K,S,Dh] -> [B,n,heads*Dh]."""
    return torch.ops.specdec_rows.tree_attention.default._op(q, keys, values, *seen)


def attend_add(
    qkv: nn.Linear, o: nn.Linear, gains: Tensor | None, gain_eps: float
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The products and norms of an attention in one call with what is between them, and with the norm behind it:
    (residual, x, weight and eps of that norm, rope, slots, flat keys and values, keys and values by head, what is
    seen) -> residual + attention(x), and its norm; None where not all of it is our own. gains [2,Dh]: what normalised
    queries, and keys, are multiplied by."""
    if qkv.bias is not None or o.bias is not None or not native.serves(qkv.weight):
        return None
    wide, narrow = (packed_rows(linear.weight, linear.int8) for linear in (qkv, o))
    if wide is None or narrow is None:
        return None
    operator, into, out = torch.ops.specdec_rows.attend_add.default._op, wide.packed, narrow.packed

    def add(
        residual: Tensor, x: Tensor, weight: Tensor, eps: float, rope: tuple[Tensor, Tensor],
        slots: Tensor, flat: Sequence[Tensor], heads: Sequence[Tensor], seen: Seen,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        where = *rope, slots, *flat, *heads
        return operator(residual, x, into, out, *where, *seen, gains, gain_eps, weight, eps)

    return add
