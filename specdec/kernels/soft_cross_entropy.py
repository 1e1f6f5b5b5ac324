"""Cross-entropy of a drafter's logits x against a distribution p, and its slope by the logits, for training.

    value = -sum_v p_v log q_v,  q = softmax(x);    slope_v = d value / d x_v = q_v sum_u p_u - p_v

In torch: `training.objectives.divergences.ce`, with the projection that `training.objectives.base` adds to it, which
write p, q and the slope where this reads x and log p twice and writes the slope over x. A position has several x, one
for each step of the unroll, and one p. The sum of p is 1 only if it is renormalised over the draft vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def reference(logits: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """The formula in the dtype of its inputs."""
    logq, p = logits.log_softmax(-1), logp.exp()[:, None]
    return -(p * logq).nan_to_num(nan=0.0).sum(-1), logq.exp() * p.sum(-1, keepdim=True) - p


@triton.jit
def _soft_cross_entropy(x, logp, value, best, steps, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x += row * vocab
    logp += row // steps * vocab
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + lanes
        z = tl.load(x + token, mask=token < vocab, other=-float("inf"))
        mass += tl.exp(tl.load(logp + token, mask=token < vocab, other=-float("inf")))
        higher = tl.maximum(highest, z)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.exp(z - base)
        where = tl.where(z > highest, token, where)
        highest = higher
    peak = tl.max(highest, 0)
    lse = peak + tl.log(tl.sum(total * tl.exp(highest - peak), 0))
    tl.store(best + row, tl.min(tl.where(highest == peak, where, vocab), 0).to(tl.int64))
    whole = tl.sum(mass, 0)
    loss = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + lanes
        logq = tl.load(x + token, mask=token < vocab, other=-float("inf")) - lse
        p = tl.exp(tl.load(logp + token, mask=token < vocab, other=-float("inf")))
        loss -= p * tl.where(p > 0, logq, 0.0)
        tl.store(x + token, tl.exp(logq) * whole - p, mask=token < vocab)
    tl.store(value + row, tl.sum(loss, 0))


def launch(logits: Tensor, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n,J,U] and log p [n,U], fp32 -> value [n,J], slope [n,J,U] written over the logits, and the likeliest
    token of q [n,J], the first of equals."""
    assert logits.dtype == logp.dtype == torch.float32
    assert logits.is_contiguous()
    logp = logp.contiguous()
    rows, steps, vocab = logits.shape
    value = torch.empty(rows, steps, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, steps, dtype=torch.int64, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _soft_cross_entropy[(rows * steps,)](logits, logp, value, best, steps, vocab, BLOCK=block, num_warps=8)
    return value, logits, best
