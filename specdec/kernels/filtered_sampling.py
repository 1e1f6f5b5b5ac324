"""A draw from the filtered distribution of each row of logits, without sorting the vocabulary.

    x = logits / temperature;  m = max x;  a token survives if x >= t, the largest of
    t_k = the top_k-th largest x                                                          top-k, ties kept
    t_p = the largest t with sum_{x >= t} e^x >= top_p * sum_{x >= t_k} e^x               top-p, ties kept
    t_m = m + log min_p                                                                   min-p
    token = argmax over the survivors of x - log e,  e ~ Exp(1)                           an exponential race

In torch: `sampling.draws.sample`. It differs only in ties at t_p, of which it keeps as many as its sort puts first.

Each program has one row and passes over its logits twice. The first pass finds m, sum e^x, and the largest x among the
tokens with the same number modulo BLOCK. A lower bound of t follows: the top_k-th largest of the latter, which are
those of top_k different tokens; or log((1 - top_p) / V) + log sum e^x, below which all tokens have at most 1 - top_p
together; or t_m. The second pass writes the tokens above the bound, mostly some hundred, to a list. Bisection over the
order of floats then finds t_k and t_p exactly, in 32 short passes over the list each. A flat distribution has a long
list, which is slower and as exact.

The numbers e come from Philox, keyed by a seed that is drawn from the generator on the device, and by row and token.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def reference(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The tokens that survive, [R,V] bool, found by sorting in the dtype of the logits."""
    x = logits / temperature
    kept = torch.ones_like(x, dtype=torch.bool)
    if 0 < top_k < x.shape[-1]:
        kept = x >= x.topk(top_k).values[:, -1:]
    if top_p < 1:
        p = x.masked_fill(~kept, -torch.inf).softmax(-1)
        ranked = p.sort(descending=True)
        above = ranked.values.cumsum(-1) - ranked.values  # the mass of more likely tokens
        last = ranked.values.masked_fill(above >= top_p, torch.inf).amin(-1, keepdim=True)
        kept &= p >= last
    return kept & (x >= x.amax(-1, keepdim=True) + math.log(min_p)) if min_p > 0 else kept


@triton.jit
def _order(x):
    """An int32 for an fp32, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(order):
    """The inverse of `_order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count_or_mass(scores, least, held, peak, MASS: tl.constexpr, WIDTH: tl.constexpr):
    """The number of the first `held` scores that are at least `least`; with MASS, their sum of e^(x - peak)."""
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, held, WIDTH):
        place = first + tl.arange(0, WIDTH)
        x = tl.load(scores + place, mask=place < held, other=-float("inf"))
        share = tl.full([WIDTH], 1.0, tl.float32)
        if MASS:
            share = tl.exp(x - peak)
        total += tl.where((place < held) & (x >= least), share, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _threshold(scores, held, peak, enough, low, MASS: tl.constexpr, WIDTH: tl.constexpr):
    """The largest t such that the number, or mass, of the scores of at least t is `enough`. That of the scores of at
    least `low` must be enough."""
    least, most = _order(low).to(tl.int64), _order(peak).to(tl.int64)
    while least < most:
        middle = (least + most + 1) >> 1
        there = _count_or_mass(scores, _value(middle.to(tl.int32)), held, peak, MASS, WIDTH)
        least = tl.where(there >= enough, middle, least)
        most = tl.where(there >= enough, most, middle - 1)
    return _value(least.to(tl.int32))


@triton.jit
def _kth_largest(x, k, peak):
    """The k-th largest of a vector in registers, by the same bisection."""
    least, most = _order(tl.min(x, 0)).to(tl.int64), _order(peak).to(tl.int64)
    while least < most:
        middle = (least + most + 1) >> 1
        enough = tl.sum((x >= _value(middle.to(tl.int32))).to(tl.int32), 0) >= k
        least = tl.where(enough, middle, least)
        most = tl.where(enough, most, middle - 1)
    return _value(least.to(tl.int32))


@triton.jit
def _race(x, survives, seed, number, token, best, winner, WIDTH: tl.constexpr):
    """Best score and winner so far, after the tokens of one more tile."""
    u = tl.rand(seed, number.to(tl.int32))
    # -log(1 - u), by its series where the subtraction would lose digits
    e = tl.where(u < 0.004, u * (1.0 + u * (0.5 + u * 0.3333333)), -tl.log(1.0 - u))
    score = tl.where(survives, x - tl.log(tl.maximum(e, 1e-30)), -float("inf"))
    value, place = tl.max(score, 0, return_indices=True)
    here = tl.sum(tl.where(tl.arange(0, WIDTH) == place, token, 0), 0)
    return tl.maximum(best, value), tl.where(value > best, here, winner)


@triton.jit
def _scan(logits, vocab, temperature, WIDTH: tl.constexpr):
    """The largest x of every lane of WIDTH tokens [WIDTH], the largest of all, and the sum of e^(x - largest)."""
    highest = tl.full([WIDTH], -float("inf"), tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, vocab, WIDTH):
        token = first + tl.arange(0, WIDTH)
        x = tl.load(logits + token, mask=token < vocab, other=-float("inf")).to(tl.float32) / temperature
        higher = tl.maximum(highest, x)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.exp(x - base)
        highest = higher
    peak = tl.max(highest, 0)
    return highest, peak, tl.sum(total * tl.exp(highest - peak), 0)


@triton.jit
def _list(logits, scores, ids, vocab, temperature, low, WIDTH: tl.constexpr):
    """Write the tokens of x >= low to scores and ids, in order. Returns their number."""
    held = 0
    for first in range(0, vocab, WIDTH):
        token = first + tl.arange(0, WIDTH)
        x = tl.load(logits + token, mask=token < vocab, other=-float("inf")).to(tl.float32) / temperature
        above = ((x >= low) & (token < vocab)).to(tl.int32)
        place = held + tl.cumsum(above, 0) - 1
        tl.store(scores + place, x, mask=above != 0)
        tl.store(ids + place, token, mask=above != 0)
        held += tl.sum(above, 0)
    return held


@triton.jit
def _sample(
    logits, seeds, scores, ids, tokens, least, stride, vocab, temperature, top_k, top_p, log_min_p, log_tail,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scores += row * vocab
    ids += row * vocab
    seed, lanes = tl.load(seeds), tl.arange(0, WIDTH)
    highest, peak, mass = _scan(logits, vocab, temperature, WIDTH)
    low = tl.full([], -float("inf"), tl.float32)
    if MIN_P:
        low = peak + log_min_p
    cut, best, winner = low, -float("inf"), 0
    if TOP_K or TOP_P:
        if TOP_K:
            bound = tl.where(top_k <= WIDTH, _kth_largest(highest, top_k, peak), -float("inf"))
        else:
            bound = peak + tl.log(mass) + log_tail
        held = _list(logits, scores, ids, vocab, temperature, bound, WIDTH)
        tl.debug_barrier()  # from here on every thread reads what other threads wrote
        if TOP_K:
            bound = _threshold(scores, held, peak, top_k, bound, False, WIDTH)
            mass = _count_or_mass(scores, bound, held, peak, True, WIDTH)
        if TOP_P:
            bound = _threshold(scores, held, peak, top_p * mass, bound, True, WIDTH)
        cut = tl.maximum(low, bound)
        for first in range(0, held, WIDTH):
            place = first + lanes
            x = tl.load(scores + place, mask=place < held, other=-float("inf"))
            token = tl.load(ids + place, mask=place < held, other=0)
            best, winner = _race(x, (place < held) & (x >= cut), seed, row * vocab + token, token, best, winner, WIDTH)
    else:
        for first in range(0, vocab, WIDTH):
            token = first + lanes
            x = tl.load(logits + token, mask=token < vocab, other=-float("inf")).to(tl.float32) / temperature
            best, winner = _race(x, x >= cut, seed, row * vocab + token, token, best, winner, WIDTH)
    tl.store(tokens + row, winner.to(tl.int64))
    tl.store(least + row, cut)


def launch(
    logits: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [R,V] -> a token of each row [R] int64, and its threshold t [R] fp32.

    temperature must be above 0; the other arguments are those of `types.Sampling`."""
    rows, vocab = logits.shape
    assert temperature > 0
    assert logits.stride(1) == 1
    by_k, by_p = 0 < top_k < vocab, top_p < 1
    seed = torch.randint(2**62, (1,), device=logits.device, generator=generator)
    held = (rows, vocab) if by_k or by_p else (1,)
    scores = torch.empty(held, dtype=torch.float32, device=logits.device)
    ids = torch.empty(held, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    least = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _sample[(rows,)](
        logits, seed, scores, ids, tokens, least, logits.stride(0), vocab, temperature, top_k, top_p,
        math.log(min_p) if min_p else 0.0,
        math.log((1 - top_p) / vocab) - 1e-3 if by_p else 0.0,  # 1e-3 for the rounding of the sums
        TOP_K=by_k, TOP_P=by_p, MIN_P=min_p > 0, WIDTH=min(BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return tokens, least
