"""The k most likely tokens of a head and their log-probabilities, without writing the head's logits to memory.

    logits = hidden @ weight.T;    log p = logits - logsumexp(logits);    the k largest of each row, best first

One program multiplies a few rows with a block of the vocabulary, and keeps the block's log-sum-exp and its k best. A
second kernel merges the blocks of a row. The blocks write (2 k + 1) / 128 of the size of the logits. Logits stay in
fp32, whereas torch rounds a bf16 product when it writes it. Of equal logits the one of lower index comes first. Where
hidden states are NaN, ids are any, but of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops import MOST_LIKELY
from specdec.ops.cuda.shared import product

BLOCK = 128  # tokens of a program


@triton.jit(do_not_specialize=["rows", "vocab", "blocks"])
def _blocks(
    hidden, weight, best, ids, lse, rows, size, vocab, blocks, hidden_row, weight_row,
    K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = block * TOKENS + tl.arange(0, TOKENS)
    logits = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(0, size, CHUNK):
        at = first + tl.arange(0, CHUNK)
        x_at = hidden + row.to(tl.int64)[:, None] * hidden_row + at[None, :]
        w_at = weight + token.to(tl.int64)[:, None] * weight_row + at[None, :]
        x = tl.load(x_at, mask=(row < rows)[:, None] & (at < size)[None, :], other=0.0)
        w = tl.load(w_at, mask=(token < vocab)[:, None] & (at < size)[None, :], other=0.0)
        logits += product(x, tl.trans(w))
    logits = tl.where((token < vocab)[None, :], logits, -float("inf"))
    peak = tl.max(logits, 1)
    total = tl.sum(tl.exp(logits - peak[:, None]), 1)
    out = row.to(tl.int64) * blocks + block
    tl.store(lse + out, peak + tl.log(total), mask=row < rows)
    for i in tl.static_range(K):
        value, place = tl.max(logits, 1, return_indices=True)
        tl.store(best + out * K + i, value, mask=row < rows)
        tl.store(ids + out * K + i, tl.minimum(block * TOKENS + place, vocab - 1), mask=row < rows)
        logits = tl.where(tl.arange(0, TOKENS)[None, :] == place[:, None], -float("inf"), logits)


@triton.jit(do_not_specialize=["blocks"])
def _merge(
    best, ids, lse, logp, tokens, blocks, K: tl.constexpr, BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    part = tl.load(lse + row * blocks + block, mask=block < blocks, other=-float("inf"))
    peak = tl.max(part, 0)
    whole = peak + tl.log(tl.sum(tl.exp(part - peak), 0))
    place = tl.arange(0, CANDIDATES)
    left = tl.load(best + row * blocks * K + place, mask=place < blocks * K, other=-float("inf"))
    for i in tl.static_range(K):
        value, at = tl.max(left, 0, return_indices=True)
        tl.store(logp + row * K + i, value - whole)
        at = tl.minimum(at, blocks * K - 1)
        tl.store(tokens + row * K + i, tl.load(ids + row * blocks * K + at).to(tl.int64))
        left = tl.where(place == at, -float("inf"), left)


def launch(hidden: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities fp32 and ids int64, [R,k], of hidden [R,H] @ weight [V,H].T, k up to MOST_LIKELY."""
    (rows, size), vocab = hidden.shape, len(weight)
    assert k <= min(vocab, MOST_LIKELY)
    assert hidden.stride(1) == weight.stride(1) == 1
    blocks = triton.cdiv(vocab, BLOCK)
    best = torch.empty(rows, blocks, k, dtype=torch.float32, device=hidden.device)
    ids = torch.empty(rows, blocks, k, dtype=torch.int32, device=hidden.device)
    lse = torch.empty(rows, blocks, dtype=torch.float32, device=hidden.device)
    tile = min(64, max(16, triton.next_power_of_2(rows)))
    # Neighbouring programs share a block of hidden states, which is small. Each weight is read once.
    _blocks[(blocks, triton.cdiv(rows, tile))](
        hidden, weight, best, ids, lse, rows, size, vocab, blocks, hidden.stride(0), weight.stride(0),
        K=k, ROWS=tile, TOKENS=BLOCK, CHUNK=128 // hidden.element_size(), num_warps=4, num_stages=3,
    )  # fmt: skip
    logp = torch.empty(rows, k, dtype=torch.float32, device=hidden.device)
    tokens = torch.empty(rows, k, dtype=torch.int64, device=hidden.device)
    candidates = triton.next_power_of_2(blocks * k)
    _merge[(rows,)](
        best, ids, lse, logp, tokens, blocks, K=k, BLOCKS=triton.next_power_of_2(blocks), CANDIDATES=candidates,
        num_warps=min(32, max(1, candidates // 1024)),
    )  # fmt: skip
    return logp, tokens
