"""All that is drawn for a row: a function of the row's seed, a position and a token (docs/sampling.md).

A token's position is the number of tokens before it in its row, those of the prompt included. The token at position t
of a row is the v with the largest log p(v) + G(seed, t, v). So it depends on no other row, tree, or round.

    row       = mix64(mix64(s) + GOLDEN (i + 1))                 for the seed (s, i)
    a, b      = the halves of mix64(row + GOLDEN (t + 1))        SplitMix64 (Steele, Lea, Flood 2014) at place t
    x         = mix32(v + 1) ^ a
    x         = (x ^ x >> 16) * M1;  x = (x ^ x >> 15 ^ b) * M2;  bits = x ^ x >> 16
    e         = -log(1 - u),  u = ((bits mod 2^31) + 1/2) / 2^31       exponential
    G         = -log e                                                  Gumbel

mix64 is SplitMix64's finalizer, and mix32, whose two halves surround b, is "lowbias32" (Wellons, Hash Prospector,
2018). Of 32-bit numbers torch has signed ones only: their products wrap as unsigned ones do. `specdec.ops.cuda.shared`
computes the same bits. A small e wins, so u is exact near 0; at the other end it stays below 1, and no e is above 16.7.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Seed = tuple[int, int]

GOLDEN, M64 = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
M32 = 0x7FEB352D, 0x846CA68B
SCALE = 2.0**-31 - 2.0**-55  # the largest u is the largest fp32 below 1
HALF = 2.0**-32
# Streams of one position. What q-aware rules draw is fresh in every round, so its stream is that of the round's root.
DRAFTS, COINS = 0x5851F42D4C957F2D, 0x14057B7EF767814F


def signed(x: int, bits: int = 64) -> int:
    """Return the number that torch has for an unsigned one, or for any other mod 2^bits."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def _shift(x: Tensor, count: int, bits: int) -> Tensor:
    """Return x >> count of unsigned numbers."""
    return (x >> count).bitwise_and_((1 << (bits - count)) - 1)


def mix64(x: Tensor) -> Tensor:
    """Return SplitMix64's finalizer of int64 numbers of any shape."""
    for count, factor in zip((30, 27), M64, strict=True):
        x = (x ^ _shift(x, count, 64)) * signed(factor)
    return x ^ _shift(x, 31, 64)


def mix32(x: Tensor, between: Tensor | None = None) -> Tensor:
    """Return lowbias32 of int32 numbers of any shape; `between` is xored in after the first half."""
    x = x ^ _shift(x, 16, 32)  # a tensor of its own, which changes in place
    x.mul_(signed(M32[0], 32)).bitwise_xor_(_shift(x, 15, 32))
    if between is not None:
        x.bitwise_xor_(between)
    x.mul_(signed(M32[1], 32))
    return x.bitwise_xor_(_shift(x, 16, 32))


def hashes_of(tokens: Tensor) -> Tensor:
    """Return the part of the noise that depends on the token alone: int32, for tokens of any shape."""
    return mix32((tokens + 1).int())


def bits_of(keys: Tensor, hashes: Tensor) -> Tensor:
    """Return 32 random bits for each hash, int32: keys [...,2] and hashes that broadcast with [...,1], int32."""
    return mix32(hashes ^ keys[..., :1], keys[..., 1:])


def uniform(bits: Tensor) -> Tensor:
    """Return fp32 in (0, 1) from 32 random bits, which are overwritten."""
    return bits.bitwise_and_(0x7FFFFFFF).float().mul_(SCALE).add_(HALF)


def gumbel(bits: Tensor) -> Tensor:
    """Return Gumbel noise in fp32 from 32 random bits, which are overwritten."""
    return uniform(bits).neg_().log1p_().neg_().log_().neg_()


class Noise:
    """The keys of a batch's rows."""

    def __init__(self, seeds: Sequence[Seed], hashes: Tensor):
        """Derive keys from a seed (s, i) of any two integers per row. hashes [V]: `hashes_of` the vocabulary."""
        numbers = torch.tensor([[signed(part) for part in seed] for seed in seeds], device=hashes.device)
        self.rows = mix64(mix64(numbers[:, 0]) + (numbers[:, 1] + 1) * signed(GOLDEN))  # [B]
        self.hashes = hashes

    def after(self, root: Tensor, depths: int = 1) -> "RoundNoise":
        """Return the noise of `depths` positions; root [B] is the position before the first drawn token."""
        return RoundNoise(self, root, depths)


@dataclass(eq=False)
class RoundNoise:
    """The noise of the D' positions after the roots of a round.

    A depth is that of the node after which a token is drawn: 0 for the root, whose next token is at position root + 1.
    """

    noise: Noise
    root: Tensor  # [B]
    depths: int  # D'

    @cached_property
    def keys(self) -> Tensor:
        """Return [B,D',2] int32 keys of the target's draws."""
        places = self.root[:, None] + torch.arange(2, 2 + self.depths, device=self.root.device)
        return _halves(mix64(self.noise.rows[:, None] + places * signed(GOLDEN)))

    @cached_property
    def whole(self) -> Tensor:
        """Return [B,D',V] Gumbel noise of the target's draws."""
        return gumbel(bits_of(self.keys, self.noise.hashes))

    def among(self, select: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [B,D',U] Gumbel noise of the target's draws for the tokens that `select` picks out of [V]."""
        hashes = select(self.noise.hashes)  # to compute noise again is faster than to select it from `whole`
        return self.whole if hashes is self.noise.hashes else gumbel(bits_of(self.keys, hashes))

    def at(self, depth: Tensor | None = None) -> Tensor:
        """Return Gumbel noise [B,V] or [B,N,V] after nodes of depth [B] or [B,N]; None: [B,D',V], of all."""
        return self.whole if depth is None else _of_depth(self.whole, depth)

    def keys_at(self, depth: Tensor | None = None) -> Tensor:
        """Return the keys [..., 2] of the draws after nodes of depth [B] or [B,N]; None: of all."""
        return self.keys if depth is None else _of_depth(self.keys, depth)

    @cached_property
    def drafts(self) -> Tensor:
        """Return [B,D',V] Gumbel noise for drafts that must be independent of the target's draws."""
        return gumbel(bits_of(self._own(DRAFTS), self.noise.hashes))

    def coins(self, depth: Tensor, tokens: Tensor) -> Tensor:
        """Return numbers in (0, 1) that decide on tokens, int64 [B,...], after nodes of depth [B,...]."""
        keys = _of_depth(self._own(COINS), depth)
        return uniform(bits_of(keys, hashes_of(tokens)[..., None])[..., 0])

    def _own(self, stream: int) -> Tensor:
        """Return [B,D',2] keys of a stream that only this round has: no round before had this root."""
        row = mix64((self.noise.rows ^ signed(stream)) + (self.root + 2) * signed(GOLDEN))
        return _halves(mix64(row[:, None] + torch.arange(1, 1 + self.depths, device=row.device) * signed(GOLDEN)))


def _halves(key: Tensor) -> Tensor:
    """Return the int32 halves [..., 2] of int64 keys [...]."""
    return key.contiguous().view(torch.int32).view(*key.shape, 2)


def _of_depth(values: Tensor, depth: Tensor) -> Tensor:
    """Return values [B,...,X] at depth [B,...] of values [B,D',X]."""
    b, depths, width = values.shape
    first = torch.arange(b, device=depth.device).mul_(depths).view(b, *[1] * (depth.ndim - 1))
    return values.flatten(0, 1).index_select(0, (first + depth).flatten()).view(*depth.shape, width)
