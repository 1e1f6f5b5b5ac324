"""Which scratch slots each node of a tree sees, a bit for each: the mask that `tree_attention` reads.

    words[b,i,w] = sum_j seen[b,i,32 w + j] << j        0 <= j < 32, as int32, whose sign is the highest bit

In torch: `attention.ancestor_words`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # of a program


def reference(seen: Tensor) -> Tensor:
    """The formula, bit by bit."""
    words = torch.zeros(*seen.shape[:2], -(-seen.shape[2] // 32), dtype=torch.int64, device=seen.device)
    for column in range(seen.shape[2]):
        words[..., column // 32] += seen[..., column].long() << column % 32
    return words.to(torch.int32)


@triton.jit
def _ancestor_words(seen, words, rows, n, columns, width, batch, node, column, ROWS: tl.constexpr):
    """Strides of seen: batch, node, column."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word, bit = tl.program_id(1), tl.arange(0, 32)
    place = word * 32 + bit
    at = seen + (row // n).to(tl.int64)[:, None] * batch + (row % n)[:, None] * node + place[None, :] * column
    bits = tl.load(at, mask=(row < rows)[:, None] & (place < columns)[None, :], other=0).to(tl.int32)
    tl.store(words + row * width + word, tl.sum(bits << bit[None, :], 1).to(tl.int32), mask=row < rows)


def launch(seen: Tensor) -> Tensor:
    """seen [B,n,M] bool -> [B,n,ceil(M/32)] int32."""
    b, n, columns = seen.shape
    width = triton.cdiv(columns, 32)
    words = torch.empty(b, n, width, dtype=torch.int32, device=seen.device)
    bits = seen.view(torch.uint8)
    _ancestor_words[(triton.cdiv(b * n, ROWS), width)](
        bits, words, b * n, n, columns, width, *bits.stride(), ROWS=ROWS, num_warps=1
    )
    return words
