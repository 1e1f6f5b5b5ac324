"""Norms, rotary positions, the gated activation and the cache's moves against torch in fp64."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import FINE, close, in_dtypes, on_devices, roundings, sums

from specdec.model.cache import KVCache
from specdec.model.rope import Rope
from specdec.ops.cuda import commit, gated, norm_pair, rms_norm, rope_write
from specdec.ops.gated import ACTIVATIONS
from specdec.ops.rope_write import rotate

pytestmark = [on_devices, pytest.mark.usefixtures("as_in_decoding")]


def normalised(x, weight, eps: float, offset: bool = False) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], weight.double() + offset, eps)


@pytest.mark.matrix
@in_dtypes
@pytest.mark.parametrize("size", [1, 96, 500])
@pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_rms_norm(device, dtype, size, offset, residual):
    x, other = (torch.randn(2, 3, size) * 3).to(dtype), torch.randn(2, 3, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    if residual:
        total, got = rms_norm.launch(x.to(device), weight.to(device), 1e-5, offset, other.to(device))
        exact = x.double() + other.double()
        x = total.cpu()  # what is normalised is the sum as it was rounded
        close(x, exact, exact.abs() * roundings(dtype, 1))
    else:
        got = rms_norm.launch(x.to(device), weight.to(device), 1e-5, offset)
    wanted = normalised(x, weight, 1e-5, offset)
    assert got.dtype == dtype
    close(got.cpu(), wanted, wanted.abs() * (roundings(dtype, 1 if offset else 2) + sums(size) + 4 * FINE))


@in_dtypes
@pytest.mark.parametrize("size", [1, 96, 500])
def test_norm_pair(device, dtype, size):
    x, y = (torch.randn(2, 3, size) * 3).to(dtype), torch.randn(2, 1, size).to(dtype).expand(2, 3, size)
    weights, eps = tuple(torch.randn(2, size).to(dtype)), (1e-5, 1e-2)
    got = norm_pair.launch(x.to(device), y.to(device), tuple(w.to(device) for w in weights), eps)
    wanted = torch.cat([normalised(*side) for side in zip((x, y), weights, eps, strict=True)], -1)
    close(got.cpu(), wanted, wanted.abs() * (roundings(dtype, 2) + sums(size) + 4 * FINE))


def test_rms_norm_takes_strided_rows(device):
    x, weight = torch.randn(4, 10, device=device)[:, 2:8], torch.ones(6, device=device)
    wanted = normalised(x, weight, 1e-5)
    close(rms_norm.launch(x, weight, 1e-5), wanted, 16 * FINE * wanted.abs())


@pytest.mark.matrix
@in_dtypes
@pytest.mark.parametrize("dim", [32, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("norm", [None, "plain", "offset"])
def test_rope_write(device, dtype, dim, heads, kv_heads, norm):
    """Of three rows the middle one is padding, and writes nothing."""
    rows = (torch.randn(3, heads + 2 * kv_heads, dim) * 2).to(dtype)
    tables = [table[torch.tensor([5, 0, 90])][None, :, None].to(dtype) for table in Rope().tables(dim, 100)]
    gains = torch.randn(2, dim).to(dtype) if norm else None
    keys, values = torch.full((2, 9, kv_heads * dim), 7.0).to(device, dtype)
    given = None if gains is None else gains.to(device)
    slots = torch.tensor([4, -1, 8], device=device)
    where = *(table.to(device) for table in tables), slots, keys, values
    q = rope_write.launch(rows.to(device), *where, given, 1e-6, norm == "offset").squeeze(0).cpu()
    parts = list(rows.double().split([heads, kv_heads, kv_heads], dim=1))
    for side in (0, 1) if norm else ():
        parts[side] = normalised(parts[side], gains[side], 1e-6, norm == "offset")
    wanted = [rotate(part[None], *(table.double() for table in tables))[0] for part in parts[:2]]
    # Two products and their sum; each operand has been rounded as often as its norm rounds.
    rounds = roundings(dtype, {None: 0, "plain": 2, "offset": 1}[norm]) + sums(dim) + 4 * FINE
    got = q, keys.cpu()[[4, 8]].unflatten(1, (kv_heads, dim))
    for side, exact, some in zip(got, wanted, (slice(None), slice(0, 3, 2)), strict=True):
        sizes = (exact.square() + exact.roll(dim // 2, -1).square()).sqrt()
        close(side, exact[some], (sizes * 2 * rounds + exact.abs() * roundings(dtype, 1))[some])
    assert torch.equal(values.cpu()[[4, 8]].unflatten(1, (kv_heads, dim)), rows[::2, heads + kv_heads :])
    untouched = [0, 1, 2, 3, 5, 6, 7]
    assert (keys[untouched] == 7).all()
    assert (values[untouched] == 7).all()


@pytest.mark.matrix
@in_dtypes
@pytest.mark.parametrize(
    ("lens", "path", "n"),
    [
        ([0], [[0]], [1]),
        ([5, 0], [[0, 1, 3, 7], [0, 2, 0, 0]], [4, 2]),
        ([7, 3], [[0, 2, 3, 4, 5], [0, 4, 9, 0, 0]], [5, 0]),  # a source that an earlier move's neighbour becomes
        ([9], [list(range(0, 60, 2))], [30]),
    ],
    ids=["root", "ragged", "overlap", "long"],
)
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 32), (3, 96)])
def test_commit(device, dtype, lens, path, n, kv_heads, dim):
    cache = KVCache(2, len(lens), 80, kv_heads, dim, like=torch.empty(0, dtype=dtype, device=device))
    for kv in cache.layers:
        kv.copy_(torch.randn(kv.shape))
    cache.lens.copy_(torch.tensor(lens))
    wanted = [kv.clone() for kv in cache.layers]
    path, n = torch.tensor(path, device=device), torch.tensor(n, device=device)
    for b, length in enumerate(lens):
        for k in range(1, int(n[b])):  # in this order no source has been overwritten
            for kv in wanted:
                kv[:, b, length + k] = kv[:, b, length + path[b, k]]
    addresses = torch.tensor([kv.data_ptr() for kv in cache.layers], device=device)
    commit.launch(addresses, cache.layers[0], cache.lens, path, n)
    for got, want in zip(cache.layers, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.matrix
@in_dtypes
@pytest.mark.parametrize("activation", gated.ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 90, 1024, 1500])
def test_gated(device, dtype, activation, width):
    rows = (torch.randn(3, 2 * width) * 4).to(dtype)
    gate, up = rows.double().chunk(2, dim=-1)
    wanted = ACTIVATIONS[activation](gate) * up
    gate, up = gate.abs(), up.abs()
    # sigmoid(z) in fp32 is off by a few units in the last place, and by |z| of them from e^-z. Far out on the left
    # torch's gelu loses digits too, even in fp64: it adds 1 to a tanh that is almost -1.
    size = 1 + 2 * (gate + gate**3 if activation == "gelu_tanh" else gate)
    allowed = wanted.abs() * (roundings(dtype, 1) + 4 * FINE * size) + gate * up * torch.finfo(torch.float64).eps
    close(gated.launch(rows.to(device), activation).cpu(), wanted, allowed)
