"""Norms, rotary positions, the gated activation and the cache's moves against their formulas in fp64."""

from collections.abc import Callable

import pytest
import torch
from kernel_cases import FINE, close, in_dtypes, on_devices, roundings, sums

from specdec.kernels import commit, gated, rms_norm, rope_write
from specdec.model.cache import KVCache
from specdec.model.rope import Rope

pytestmark = on_devices


def launches(bf16, ints) -> dict[str, Callable]:
    """What `kernel_compile` compiles. No launch runs, so the tensors may hold anything."""
    heads, kv_heads, dim, nodes, slots = 32, 8, 128, 60, 4096
    x, weight, rows = bf16(nodes, 4096), bf16(4096), bf16(nodes, heads + 2 * kv_heads, dim)
    where = bf16(1, nodes, 1, dim), bf16(1, nodes, 1, dim), ints(nodes), *bf16(2, slots, kv_heads * dim)
    cache = ints(32), bf16(2, 1, slots, kv_heads, dim), ints(1)
    return {
        "norm": lambda: rms_norm.launch(x, weight, 1e-5),
        "residual and norm": lambda: rms_norm.launch(x, weight, 1e-5, residual=x),
        "rotation": lambda: rope_write.launch(rows, *where),
        "norms and rotation": lambda: rope_write.launch(rows, *where, bf16(2, dim), 1e-6),
        "path of 8": lambda: commit.launch(*cache, ints(1, 8), ints(1)),
        "path of 64": lambda: commit.launch(*cache, ints(1, 64), ints(1)),
        "SwiGLU": lambda: gated.launch(bf16(nodes, 2 * 14336), "silu"),
        "GeGLU": lambda: gated.launch(bf16(nodes, 2 * 14336), "gelu_tanh"),
    }


@in_dtypes
@pytest.mark.parametrize("size", [1, 96, 500])
@pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_rms_norm(device, dtype, size, offset, residual):
    torch.manual_seed(0)
    x, other = (torch.randn(2, 3, size) * 3).to(dtype), torch.randn(2, 3, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    if residual:
        total, got = rms_norm.launch(x.to(device), weight.to(device), 1e-5, offset, other.to(device))
        exact = x.double() + other.double()
        x = total.cpu()  # what is normalised is the sum as it was rounded
        close(x, exact, exact.abs() * roundings(dtype, 1))
    else:
        got = rms_norm.launch(x.to(device), weight.to(device), 1e-5, offset)
    wanted = rms_norm.reference(x.double(), weight.double(), 1e-5, offset)
    assert got.dtype == dtype
    close(got.cpu(), wanted, wanted.abs() * (roundings(dtype, 1 if offset else 2) + sums(size) + 4 * FINE))


def test_rms_norm_takes_strided_rows(device):
    x = torch.randn(4, 10, device=device)[:, 2:8]
    wanted = rms_norm.reference(x.double(), torch.ones(6, device=device).double(), 1e-5)
    close(rms_norm.launch(x, torch.ones(6, device=device), 1e-5), wanted, 16 * FINE * wanted.abs())


def turned(device, dtype, heads, kv_heads, dim, norm, offset=False):
    """q, keys and values of a launch on 3 rows, the middle one padding; the rows; the formula's results."""
    torch.manual_seed(0)
    rows = (torch.randn(3, heads + 2 * kv_heads, dim) * 2).to(dtype)
    cos, sin = (table[torch.tensor([5, 0, 90])].to(dtype) for table in Rope().tables(dim, 100))
    gains = torch.randn(2, dim).to(dtype) if norm else None
    keys, values = torch.full((2, 9, kv_heads * dim), 7.0).to(device, dtype)
    slots = torch.tensor([4, -1, 8], device=device)
    given = None if gains is None else gains.to(device)
    tables = (x[None, :, None].to(device) for x in (cos, sin))
    q = rope_write.launch(rows.to(device), *tables, slots, keys, values, given, 1e-6, offset).squeeze(0)
    gains = None if gains is None else gains.double() + offset
    wanted = rope_write.reference(rows.double(), cos.double(), sin.double(), kv_heads, gains, 1e-6)
    return q, keys, values, rows, wanted


@in_dtypes
@pytest.mark.parametrize("dim", [32, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("norm", [None, "plain", "offset"])
def test_rope_write(device, dtype, dim, heads, kv_heads, norm):
    q, keys, values, rows, wanted = turned(device, dtype, heads, kv_heads, dim, norm, norm == "offset")
    # Two products and their sum; each operand has been rounded as often as its norm rounds.
    sizes = (wanted[0].square() + wanted[0].roll(dim // 2, -1).square()).sqrt()
    rounds = roundings(dtype, {None: 0, "plain": 2, "offset": 1}[norm]) + sums(dim) + 4 * FINE
    close(q.cpu(), wanted[0], sizes * 2 * rounds + wanted[0].abs() * roundings(dtype, 1))
    stored = keys.cpu()[[4, 8]].unflatten(1, (kv_heads, dim))
    sizes = (wanted[1].square() + wanted[1].roll(dim // 2, -1).square()).sqrt()
    close(stored, wanted[1][::2], (sizes * 2 * rounds + wanted[1].abs() * roundings(dtype, 1))[::2])
    assert torch.equal(values.cpu()[[4, 8]].unflatten(1, (kv_heads, dim)), rows[::2, heads + kv_heads :])


def test_padding_and_other_slots_are_left_alone(device):
    _, keys, values, *_ = turned(device, torch.float32, 2, 1, 32, None)
    untouched = [0, 1, 2, 3, 5, 6, 7]
    assert (keys[untouched] == 7).all()
    assert (values[untouched] == 7).all()


def caches(device, dtype, lens, kv_heads, dim, layers=2):
    torch.manual_seed(0)
    cache = KVCache(layers, len(lens), 80, kv_heads, dim, torch.empty(0, dtype=dtype, device=device))
    for kv in cache.layers:
        kv.copy_(torch.randn(kv.shape))
    cache.lens.copy_(torch.tensor(lens))
    return cache


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
    cache = caches(device, dtype, lens, kv_heads, dim)
    wanted = [kv.clone() for kv in cache.layers]
    path, n = torch.tensor(path, device=device), torch.tensor(n, device=device)
    commit.reference(wanted, cache.lens, path, n)
    addresses = torch.tensor([kv.data_ptr() for kv in cache.layers], device=device)
    commit.launch(addresses, cache.layers[0], cache.lens, path, n)
    for got, want in zip(cache.layers, wanted, strict=True):
        assert torch.equal(got, want)


@in_dtypes
@pytest.mark.parametrize("activation", gated.ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 90, 1024, 1500])
def test_gated(device, dtype, activation, width):
    torch.manual_seed(0)
    rows = (torch.randn(3, 2 * width) * 4).to(dtype)
    wanted = gated.reference(rows.double(), activation)
    gate, up = rows.double().abs().chunk(2, dim=-1)
    # sigmoid(z) in fp32 is off by a few units in the last place, and by |z| of them from e^-z. Far out on the left
    # torch's gelu loses digits too, even in fp64: it adds 1 to a tanh that is almost -1.
    size = 1 + 2 * (gate + gate**3 if activation == "gelu_tanh" else gate)
    allowed = wanted.abs() * (roundings(dtype, 1) + 4 * FINE * size) + gate * up * torch.finfo(torch.float64).eps
    close(gated.launch(rows.to(device), activation).cpu(), wanted, allowed)
