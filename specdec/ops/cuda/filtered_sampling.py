"""A draw from the filtered distribution of each row of logits, without sorting the vocabulary.

    p = softmax(x / temperature) of the logits x;  a token survives if x >= t, the largest of
    t_k = the top_k-th largest x                                                          top-k, with ties
    t_p = the largest t with sum_{x >= t} p >= top_p * sum_{x >= t_k} p                   top-p, with ties
    t_m = max x + temperature * log min_p                                                 min-p
    token = argmax over the survivors of x / temperature - log e                        an exponential race

In torch: `sampling.filters.sample`. It differs only in ties at t_p, of which it keeps as many as its sort puts first.

A row is cut into parts, so that few rows fill a GPU too. Three kernels follow each other:

    scan    part of a row -> its largest x, its sum of p, and the largest x of each of LANES / parts sets of its tokens
    list    part of a row -> those of its tokens that may survive, mostly a handful
    draw    row -> its lists moved together; t_k and then t_p, found exactly by bisection over the order of floats in 32
            short passes over the list each; the race of the surviving tokens

A token may survive if it is above a lower bound of t, which follows from what all parts of its row scanned. With top-k
that is the top_k-th largest of the LANES largest x, which are those of top_k different tokens. With top-p alone it is
where p = (1 - top_p) / V, below which all tokens have at most 1 - top_p together. A flat distribution has a long list,
which is slower and as exact. Without top-k and top-p there are no lists: `list` holds the race of its part, and `draw`
takes the best part. Then only min-p needs the scan.

The numbers e are the noise of `sampling.noise`, by the key that comes with each row and by token. How a row is cut does
not change them.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.cuda.shared import exponential, part_count, processors

LANES = 2048  # sets of tokens of a row whose largest bound its top-k-th largest; tokens of a tile of `scan`
TILE = 1024  # tokens of a tile of `list` and `draw`, which need more registers for each
LEAST_PART = 2048  # tokens of a part at least
MOST_PARTS = 64
RESIDENT = 4  # programs on a multiprocessor; their registers fit, and their loads together keep its memory busy


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
def _finite(peak):
    """What to measure exponents from: 0 in place of the -inf of nothing seen yet, as -inf - -inf is no number."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def _count_or_mass(scores, least, held, peak, inverse, MASS: tl.constexpr, WIDTH: tl.constexpr):
    """The number of the first `held` scores that are at least `least`; with MASS, their sum of p / p(peak)."""
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, held, WIDTH):
        place = first + tl.arange(0, WIDTH)
        x = tl.load(scores + place, mask=place < held, other=-float("inf"))
        share = tl.full([WIDTH], 1.0, tl.float32)
        if MASS:
            share = tl.exp((x - peak) * inverse)
        total += tl.where((place < held) & (x >= least), share, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _threshold(scores, held, peak, inverse, enough, low, MASS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the largest t such that the number, or mass, of the scores of at least t is `enough`.

    That of the scores of at least `low` must be enough.
    """
    least, most = _order(low).to(tl.int64), _order(peak).to(tl.int64)
    while least < most:
        middle = (least + most + 1) >> 1
        there = _count_or_mass(scores, _value(middle.to(tl.int32)), held, peak, inverse, MASS, WIDTH)
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
def _read(logits, start, first, vocab, size, WIDTH: tl.constexpr):
    """A tile of the part of `size` tokens from `start` on: x, the tokens, and whether there are; else x is -inf."""
    token = start + first + tl.arange(0, WIDTH)
    real = (first + tl.arange(0, WIDTH) < size) & (token < vocab)
    return tl.load(logits + token, mask=real, other=-float("inf")).to(tl.float32), token, real


@triton.jit
def _race(x, survives, inverse, a, b, token, best, winner, WIDTH: tl.constexpr):
    """Best score and winner so far, after the tokens of one more tile."""
    score = tl.where(survives, x * inverse - tl.log(exponential(token, a, b)), -float("inf"))
    value, place = tl.max(score, 0, return_indices=True)
    here = tl.sum(tl.where(tl.arange(0, WIDTH) == place, token, 0), 0)
    return tl.maximum(best, value), tl.where(value > best, here, winner)


@triton.jit
def _scan(logits, lanes, peaks, masses, stride, vocab, size, inverse, TOP: tl.constexpr, WIDTH: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    highest = tl.full([WIDTH], -float("inf"), tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, size, WIDTH):
        x, _, _ = _read(logits + row * stride, part * size, first, vocab, size, WIDTH)
        higher = tl.maximum(highest, x)
        base = _finite(higher)
        total = total * tl.exp((highest - base) * inverse) + tl.exp((x - base) * inverse)
        highest = higher
    peak, place = tl.max(highest, 0), row * tl.num_programs(1) + part
    tl.store(peaks + place, peak)
    tl.store(masses + place, tl.sum(total * tl.exp((highest - _finite(peak)) * inverse), 0))
    tl.store(lanes + place * TOP + tl.arange(0, TOP), tl.max(tl.reshape(highest, [TOP, WIDTH // TOP]), 1))


@triton.jit
def _whole(peaks, masses, inverse, PARTS: tl.constexpr):
    """The largest x of a row, and its sum of p / p(largest), from those of its parts."""
    peaks = tl.load(peaks + tl.arange(0, PARTS))
    peak = tl.max(peaks, 0)
    return peak, tl.sum(tl.load(masses + tl.arange(0, PARTS)) * tl.exp((peaks - _finite(peak)) * inverse), 0)


@triton.jit(do_not_specialize=["top_k"])
def _list(
    logits, keys, lanes, peaks, masses, scores, ids, counts, least, stride, vocab, size, inverse, top_k, log_tail, gap,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, PARTS: tl.constexpr, TOP: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    place = row * PARTS + part
    low = tl.full([], -float("inf"), tl.float32)
    if TOP_K or TOP_P or MIN_P:
        peak, mass = _whole(peaks + row * PARTS, masses + row * PARTS, inverse, PARTS)
    if TOP_K or TOP_P:
        if not TOP_K:
            low = peak + (tl.log(mass) + log_tail) / inverse
        elif top_k <= PARTS * TOP:
            low = _kth_largest(tl.load(lanes + row * PARTS * TOP + tl.arange(0, PARTS * TOP)), top_k, peak)
        at = row * vocab + part * size
        held = 0
        for first in range(0, size, WIDTH):
            x, token, real = _read(logits, part * size, first, vocab, size, WIDTH)
            above = (real & (x >= low)).to(tl.int32)
            entry = at + held + tl.cumsum(above, 0) - 1
            tl.store(scores + entry, x, mask=above != 0)
            tl.store(ids + entry, token, mask=above != 0)
            held += tl.sum(above, 0)
        tl.store(counts + place, held)
    else:
        if MIN_P:
            low = peak + gap
        best, winner, a, b = -float("inf"), 0, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
        for first in range(0, size, WIDTH):
            x, token, real = _read(logits, part * size, first, vocab, size, WIDTH)
            best, winner = _race(x, real & (x >= low), inverse, a, b, token, best, winner, WIDTH)
        tl.store(scores + place, best)
        tl.store(ids + place, winner)
    tl.store(least + row, low)  # the same from every part


@triton.jit
def _gather(scores, ids, counts, size, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Move the lists of a row together, in place, and return how many tokens they hold.

    A tile is read before it is written, and later reads start after it.
    """
    held = tl.sum(tl.load(counts + tl.arange(0, PARTS)), 0)
    for first in range(0, held, WIDTH):
        place = first + tl.arange(0, WIDTH)
        source, start = place, 0
        for part in range(PARTS):
            end = start + tl.load(counts + part)
            source = tl.where((place >= start) & (place < end), part * size + place - start, source)
            start = end
        x = tl.load(scores + source, mask=place < held, other=0.0)
        token = tl.load(ids + source, mask=place < held, other=0)
        tl.debug_barrier()
        tl.store(scores + place, x, mask=place < held)
        tl.store(ids + place, token, mask=place < held)
    tl.debug_barrier()  # from here on every thread reads what other threads wrote
    return held


@triton.jit(do_not_specialize=["top_k"])
def _draw(
    keys, peaks, masses, scores, ids, counts, tokens, least, vocab, size, inverse, top_k, top_p, gap,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    keys, least, tokens = keys + 2 * row, least + row, tokens + row
    if TOP_K or TOP_P:
        scores += row * vocab
        ids += row * vocab
        peak, mass = _whole(peaks + row * PARTS, masses + row * PARTS, inverse, PARTS)
        held = _gather(scores, ids, counts + row * PARTS, size, PARTS, WIDTH)
        cut = tl.load(least)
        if TOP_K:
            cut = _threshold(scores, held, peak, inverse, top_k, cut, False, WIDTH)
            mass = _count_or_mass(scores, cut, held, peak, inverse, True, WIDTH)
        if TOP_P:
            cut = _threshold(scores, held, peak, inverse, top_p * mass, cut, True, WIDTH)
        if MIN_P:
            cut = tl.maximum(cut, peak + gap)
        best, winner, a, b = -float("inf"), 0, tl.load(keys), tl.load(keys + 1)
        for first in range(0, held, WIDTH):
            place = first + tl.arange(0, WIDTH)
            x = tl.load(scores + place, mask=place < held, other=-float("inf"))
            token = tl.load(ids + place, mask=place < held, other=0)
            survives = (place < held) & (x >= cut)
            best, winner = _race(x, survives, inverse, a, b, token, best, winner, WIDTH)
        tl.store(least, cut)
    else:
        _, place = tl.max(tl.load(scores + row * PARTS + tl.arange(0, PARTS)), 0, return_indices=True)
        winner = tl.load(ids + row * PARTS + place)
    tl.store(tokens, winner.to(tl.int64))  # type: ignore[attr-defined]  # 0 above is a tensor in a kernel


def launch(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, keys: Tensor, parts: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row of logits [R,V]. Return the tokens [R] int64 and the thresholds t [R] fp32.

    temperature must be above 0; the filters are those of `structs.Sampling`. keys [R,2] int32: as `RoundNoise.keys_at`
    gives them. parts: of a row, a power of two; None for so many that RESIDENT programs run on each multiprocessor. The
    thresholds have the unit of the logits.
    """
    rows, vocab = logits.shape
    assert temperature > 0
    assert logits.stride(1) == 1
    by_k, by_p, by_peak = 0 < top_k < vocab, top_p < 1, min_p > 0
    if parts is None:
        parts = part_count(rows, RESIDENT * processors(logits.device), vocab // LEAST_PART, MOST_PARTS)
    size = triton.cdiv(vocab, parts * 128) * 128 if parts > 1 else vocab  # divisible by 128, so that loads can be wide
    width = min(LANES, triton.next_power_of_2(size))
    top = min(LANES // parts, width)

    def empty(dtype: torch.dtype, *columns: int) -> Tensor:
        return torch.empty(rows, *columns, dtype=dtype, device=logits.device)

    keys = keys.contiguous()
    peaks, masses, lanes = (empty(torch.float32, columns) for columns in (parts, parts, parts * top))
    listed = vocab if by_k or by_p else parts
    scores, ids, counts = empty(torch.float32, listed), empty(torch.int32, listed), empty(torch.int32, parts)
    tokens, least = empty(torch.int64), empty(torch.float32)
    inverse, gap = 1 / temperature, temperature * math.log(min_p) if by_peak else 0.0
    log_tail = math.log((1 - top_p) / vocab) - 1e-3 if by_p else 0.0  # 1e-3 for the rounding of the sums
    how = {"TOP_K": by_k, "TOP_P": by_p, "MIN_P": by_peak, "PARTS": parts, "WIDTH": min(TILE, width), "num_warps": 4}
    if by_k or by_p or by_peak:
        _scan[(rows, parts)](
            logits, lanes, peaks, masses, logits.stride(0), vocab, size, inverse, TOP=top, WIDTH=width, num_warps=4
        )
    _list[(rows, parts)](
        logits, keys, lanes, peaks, masses, scores, ids, counts, least, logits.stride(0), vocab, size, inverse, top_k,
        log_tail, gap, TOP=top, **how,
    )  # fmt: skip
    _draw[(rows,)](
        keys, peaks, masses, scores, ids, counts, tokens, least, vocab, size, inverse, top_k, float(top_p), gap, **how
    )
    return tokens, least
