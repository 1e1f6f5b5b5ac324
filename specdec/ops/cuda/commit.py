"""The keys and values of an accepted path move down in place, in all layers at once.

    kv[l,:,b,lens[b]+k] = kv[l,:,b,lens[b]+path[b,k]]    for 1 <= k < n[b]; the root stays where it is

In torch: `ops.commit.reference`. A slot may be the source of one move and the destination of another, so a program
reads all rows of its columns before it writes one.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE = 8192  # entries that a program holds; more do not fit its registers


@triton.jit(do_not_specialize=["rows", "slots", "steps"])
def _commit(addresses, like, lens, path, n, rows, slots, width, steps, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    side, row = tl.program_id(0) % 2, tl.program_id(1)
    kv = tl.multiple_of(tl.load(addresses + tl.program_id(0) // 2).to(like.dtype), 16)
    first = (side * rows + row).to(tl.int64) * slots + tl.load(lens + row)
    step = tl.arange(0, STEPS)
    moves = (step > 0) & (step < tl.load(n + row))
    source = first + tl.load(path + row * steps + step, mask=moves, other=0)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = moves[:, None] & (columns < width)[None, :]
    moved = tl.load(kv + source[:, None] * width + columns[None, :], mask=mask, other=0.0)
    tl.debug_barrier()  # every warp has read before any writes
    tl.store(kv + (first + step)[:, None] * width + columns[None, :], moved, mask=mask)


def launch(addresses: Tensor, like: Tensor, lens: Tensor, path: Tensor, n: Tensor) -> None:
    """Move the slots of accepted paths in all layers.

    addresses [L] int64: `data_ptr` of each layer's tensor [2,R,S,K,Dh], contiguous, of which `like` is one. lens, n [B]
    of the rows in use, path [B,P].
    """
    _, _, slots, kv_heads, dim = like.shape
    width, (batch, steps) = kv_heads * dim, path.shape
    assert like.storage_offset() == 0, "rows count from the first in memory"
    padded = triton.next_power_of_2(steps)
    block = min(256, triton.next_power_of_2(width), max(16, TILE // padded))
    _commit[(2 * len(addresses), batch, triton.cdiv(width, block))](
        addresses, like, lens, path.contiguous(), n, like.stride(0) // like.stride(1), slots, width, steps,
        STEPS=padded, BLOCK=block, num_warps=4,
    )  # fmt: skip
