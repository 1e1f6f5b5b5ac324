"""The noise of draws: statistical tests, its law at both ends, its streams."""

from itertools import combinations

import pytest
import torch
from scipy import stats

from specdec.sampling import noise as module
from specdec.sampling.noise import SCALE, Noise, bits_of, gumbel, hashes_of, mix32, mix64, signed, uniform


def grid(seeds, positions: int, tokens) -> torch.Tensor:
    """Return the bits [seeds, positions, tokens] of the positions from 1 on."""
    rows = Noise(seeds, hashes_of(torch.as_tensor(tokens)))
    return bits_of(rows.after(torch.zeros(len(seeds), dtype=torch.int64), positions).keys, rows.hashes)


def test_bits_are_even_and_independent(whole):
    """Two-sided p-values of every bit's mean, of the correlations of bits over neighbouring seeds, positions and
    tokens, and of the bytes of differences."""
    half, positions = (24, 48) if whole else (12, 24)
    bits = grid([(0, row) for row in range(half)] + [(s, 0) for s in range(1, half + 1)], positions, range(256))

    def signs(bits: torch.Tensor) -> torch.Tensor:
        return (((bits[..., None] >> torch.arange(32)) & 1).float() * 2 - 1).view(-1, 32)

    def scores(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Standard scores of the correlations of all bits of a with all bits of b, [32,32]."""
        return (signs(a).T @ signs(b)) / a.numel() ** 0.5

    found = {"bits": signs(bits).mean(0) * bits.numel() ** 0.5}
    found |= {"seeds": scores(bits[1:], bits[:-1]), "positions": scores(bits[:, 1:], bits[:, :-1])}
    found |= {f"tokens {n} apart": scores(bits[..., n:], bits[..., :-n]) for n in (1, 2, 16, 128)}
    pairs = combinations((0, 1, 2, 3, 64, 255), 2)
    found["pairs of tokens"] = torch.stack([scores(bits[..., i], bits[..., j]) for i, j in pairs])
    for shift in (0, 8, 16, 24):
        apart = ((bits[:, 1:] ^ bits[:, :-1]) >> shift) & 255
        counts = apart.flatten().bincount(minlength=256).double()
        found[f"byte {shift // 8}"] = torch.tensor(stats.norm.isf(stats.chisquare(counts.numpy()).pvalue / 2))
    # The largest of n scores: n times the tail of one.
    pvalues = {name: z.numel() * 2 * stats.norm.sf(float(z.abs().max())) for name, z in found.items()}
    assert min(pvalues.values()) > 1e-3 / len(found), pvalues


def test_collisions_and_seeds():
    """Over 150,000 positions a token's bits repeat as often as random numbers do. Tokens of one position share none.
    Seeds are any two integers."""
    rows = Noise([(7, 0)], hashes_of(torch.tensor([3, 77])))
    bits = bits_of(rows.after(torch.tensor([0]), 150_000).keys, rows.hashes)[0]
    repeated = sum(150_000 - len(column.unique()) for column in bits.T)
    expected = 2 * 150_000**2 / 2**33
    assert stats.poisson.sf(repeated - 1, expected) > 1e-3
    assert stats.poisson.cdf(repeated, expected) > 1e-3
    assert all(len(row.unique()) == 20_000 for row in grid([(0, 0)], 4, range(20_000))[0])
    seeds = [(0, 0), (0, 1), (1, 0), (-1, 0), (2**80, 3), (2**80 + 1, 3)]
    assert len(Noise(seeds, hashes_of(torch.arange(3))).rows.unique()) == len(seeds)


def test_mixes_are_the_published_ones():
    """lowbias32, and SplitMix64 started at 0, whose first numbers are in the tests of Vigna and Java."""
    for x in (1, -5):
        expected = x & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            expected = (expected ^ expected >> shift) * factor & 0xFFFFFFFF
        assert mix32(torch.tensor([x], dtype=torch.int32)).item() & 0xFFFFFFFF == expected ^ expected >> 16
    first = [x & (2**64 - 1) for x in mix64(torch.tensor([1, 2, 3]) * signed(module.GOLDEN)).tolist()]
    assert first == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_the_law():
    values = gumbel(grid([(1, row) for row in range(8)], 32, range(1024)))
    assert stats.kstest(values.flatten()[::4].double().numpy(), "gumbel_r").pvalue > 1e-3
    largest = values.amax(-1).flatten().double() - torch.tensor(1024.0, dtype=torch.float64).log()
    assert stats.kstest(largest.numpy(), "gumbel_r").pvalue > 1e-3


def test_both_ends_are_finite_and_fine():
    """A token wins by a small e, where neighbouring bits must give different numbers; the other end stays finite."""
    bits = torch.tensor([0, 1, 2, 1000, 2**24, 2**31 - 1, -1], dtype=torch.int32)
    u = uniform(bits.clone())
    assert u.min() > 0
    assert u.max() < 1
    assert len(u[:5].unique()) == 5
    exact = -torch.log1p(-(bits.bitwise_and(2**31 - 1).double() + 0.5) * SCALE)
    torch.testing.assert_close((-gumbel(bits)).exp().double()[:5], exact[:5], rtol=1e-5, atol=0)
    assert gumbel(torch.tensor([2**31 - 1], dtype=torch.int32)).item() == pytest.approx(-2.81, abs=0.01)


def test_streams_of_a_round_are_its_own():
    """Coins and drafts are independent of the target's draws, and of those of the next round at the same positions."""
    rows = Noise([(0, row) for row in range(200)], hashes_of(torch.arange(50)))
    now, then = rows.after(torch.full((200,), 9), 3), rows.after(torch.full((200,), 10), 2)
    assert torch.equal(now.whole[:, 1:], then.whole)
    same = {"drafts": (now.drafts[:, 1:], then.drafts), "target": (now.drafts, now.whole)}
    depth, tokens = torch.ones(200, 50, dtype=torch.int64), torch.arange(50).expand(200, 50)
    same["coins"] = now.coins(depth, tokens), then.coins(depth - 1, tokens)
    for name, (a, b) in same.items():
        corr = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(corr) * a.numel() ** 0.5 < 4, name
    assert stats.kstest(now.coins(depth, tokens).flatten().numpy(), "uniform").pvalue > 1e-3


def test_coins_of_no_two_rounds_are_the_same():
    """A coin decides on a token in one round only: it follows from the round's root, not from the position alone."""
    noise = Noise([(3, 0)], hashes_of(torch.arange(256)))
    tokens = torch.tensor([[7]])
    coins = {}
    for root in range(40):
        for depth in range(4):
            coin = noise.after(torch.tensor([root]), 4).coins(torch.tensor([[depth]]), tokens).item()
            again = noise.after(torch.tensor([root]), 4).coins(torch.tensor([[depth]]), tokens).item()
            assert coin == again
            coins[root, depth] = coin
    assert len(set(coins.values())) == len(coins)
