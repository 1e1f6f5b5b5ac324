"""Attention of few positions over a cache on the CPU, by our own operator (`attention.h`), in fp32.

torch's attention wants a mask over all slots and the query heads of a key head packed, and copies for that. Ours reads
lengths and ancestors as they are. For 1 to 16 positions it takes a third to three quarters of the time (docs/log.md).
Whatever is beside a position, its result has the same bits.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specdec.model import native
from specdec.model.cache import KVCache

FEW = 32  # positions of a row; from about so many on torch's matrix products are faster
DIMS = (16, 32, 64, 80, 96, 128, 256)  # of a head


def own_attention(
    cache: KVCache, n: int, nodes: int, ancestors: Tensor | None, scale: float | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The attention of the last n of `nodes` scratch slots, q [B,n,heads,Dh] over keys and values [B,K,S,Dh] ->
    [B,n,heads*Dh]; None where there is none. ancestors [B,n,nodes] bool: the scratch slots that each of them sees;
    None: all up to itself."""
    keys, dim = cache.layers[0], cache.shape[1]
    if n > FEW or dim not in DIMS or not native.serves(keys):
        return None
    operator = torch.ops.specdec_rows.tree_attention.default._op
    scale = dim**-0.5 if scale is None else scale
    return partial(_attend, operator, (cache.lens, ancestors, nodes, scale))


def _attend(operator: Callable[..., Tensor], rest: tuple, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return operator(q, keys, values, *rest)
