"""The noise that rows are drawn by: a battery of tests; its law at both ends; its streams."""

from itertools import combinations

import pytest
import torch
from scipy import stats

from specdec.sampling import noise as module
from specdec.sampling.noise import SCALE, Noise, bits_of, gumbel, hashes_of, mix32, mix64, signed, uniform

SEEDS, POSITIONS, TOKENS = 48, 48, 256


def grid(seeds, positions: int, tokens) -> torch.Tensor:
    """Bits [seeds, positions, tokens] of the positions from 1 on."""
    rows = Noise(seeds, hashes_of(torch.as_tensor(tokens)))
    return bits_of(rows.behind(torch.zeros(len(seeds), dtype=torch.int64), positions).keys, rows.hashes)


def signs(bits: torch.Tensor) -> torch.Tensor:
    """int32 [...] -> [n,32] of -1 and 1"""
    return (((bits[..., None] >> torch.arange(32)) & 1).float() * 2 - 1).view(-1, 32)


def together(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Standard scores of the correlations of all bits of a with all bits of b, [32,32]."""
    a, b = signs(a), signs(b)
    return (a.T @ b) / len(a) ** 0.5


def battery() -> dict[str, float]:
    """p-values, two-sided: of every bit's mean, and of the correlations of bits over neighbouring seeds, positions and
    tokens, and over pairs of tokens."""
    bits = grid([(0, row) for row in range(SEEDS // 2)] + [(s, 0) for s in range(1, SEEDS // 2 + 1)], POSITIONS,
                range(TOKENS))  # fmt: skip
    means = signs(bits).mean(0) * bits.numel() ** 0.5
    found = {"bits": means}
    found |= {"seeds": together(bits[1:], bits[:-1]), "positions": together(bits[:, 1:], bits[:, :-1])}
    found |= {f"tokens {n} apart": together(bits[..., n:], bits[..., :-n]) for n in (1, 2, 16, 128)}
    pairs = [together(bits[..., i], bits[..., j]) for i, j in combinations((0, 1, 2, 3, 64, 255), 2)]
    found["pairs of tokens"] = torch.stack(pairs)
    # The bytes of differences: 256 cells each.
    for shift in (0, 8, 16, 24):
        apart = ((bits[:, 1:] ^ bits[:, :-1]) >> shift) & 255
        counts = apart.flatten().bincount(minlength=256).double()
        found[f"byte {shift // 8}"] = torch.tensor(stats.norm.isf(stats.chisquare(counts.numpy()).pvalue / 2))
    # The largest of n scores: n times the tail of one, or the whole where that is more than 1.
    return {name: min(1.0, z.numel() * 2 * stats.norm.sf(float(z.abs().max()))) for name, z in found.items()}


def test_the_battery():
    found = battery()
    assert min(found.values()) > 1e-3 / len(found), found


def test_collisions():
    """Over 150,000 positions a token's bits repeat as often as random numbers do."""
    rows = Noise([(7, 0)], hashes_of(torch.tensor([3, 77])))
    bits = bits_of(rows.behind(torch.tensor([0]), 150_000).keys, rows.hashes)[0]
    repeated = sum(150_000 - len(column.unique()) for column in bits.T)
    expected = 2 * 150_000**2 / 2**33
    assert stats.poisson.sf(repeated - 1, expected) > 1e-3
    assert stats.poisson.cdf(repeated, expected) > 1e-3
    own = grid([(0, 0)], 4, range(20_000))[0]  # the mix is a permutation: tokens of one position never share theirs
    assert all(len(row.unique()) == 20_000 for row in own)


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


def test_mixes_are_the_published_ones():
    """lowbias32, and SplitMix64 begun at 0, whose first numbers are in Vigna's and Java's tests."""
    assert mix32(torch.tensor([1], dtype=torch.int32)).item() & 0xFFFFFFFF == lowbias32(1)
    assert mix32(torch.tensor([-5], dtype=torch.int32)).item() & 0xFFFFFFFF == lowbias32(2**32 - 5)
    places = torch.tensor([1, 2, 3]) * signed(module.GOLDEN)
    first = [x & (2**64 - 1) for x in mix64(places).tolist()]
    assert first == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def lowbias32(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor & 0xFFFFFFFF
    return x ^ x >> 16


def test_seeds_are_any_two_integers():
    seeds = [(0, 0), (0, 1), (1, 0), (-1, 0), (2**80, 3), (2**80 + 1, 3)]
    keys = Noise(seeds, hashes_of(torch.arange(3))).rows
    assert len(keys.unique()) == len(seeds)


def test_streams_of_a_round_are_its_own():
    """Coins and drafts of one round share nothing with the target's draws, nor with the next round's, which may draft
    the same positions again."""
    rows = Noise([(0, row) for row in range(200)], hashes_of(torch.arange(50)))
    now, then = rows.behind(torch.full((200,), 9), 3), rows.behind(torch.full((200,), 10), 2)
    assert torch.equal(now.whole[:, 1:], then.whole)
    same = {"drafts": (now.drafts[:, 1:], then.drafts), "target": (now.drafts, now.whole)}
    depth, tokens = torch.ones(200, 50, dtype=torch.int64), torch.arange(50).expand(200, 50)
    same["coins"] = now.coins(depth, tokens), then.coins(depth - 1, tokens)
    for name, (a, b) in same.items():
        corr = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(corr) * a.numel() ** 0.5 < 4, name
    coins = now.coins(depth, tokens)
    assert stats.kstest(coins.flatten().numpy(), "uniform").pvalue > 1e-3


def test_coins_of_no_two_rounds_are_the_same():
    """A coin decides on a token in one round only: it follows from the round's root, not from the position alone."""
    noise = Noise([(3, 0)], hashes_of(torch.arange(TOKENS)))
    tokens = torch.tensor([[7]])
    coins = {}
    for root in range(40):
        for depth in range(4):
            coin = noise.behind(torch.tensor([root]), 4).coins(torch.tensor([[depth]]), tokens).item()
            again = noise.behind(torch.tensor([root]), 4).coins(torch.tensor([[depth]]), tokens).item()
            assert coin == again
            coins[root, depth] = coin
    assert len(set(coins.values())) == len(coins)
