"""Norms and rotations of our own on the CPU: the formula, and a row's bits do not depend on other rows."""

import pytest
import torch
import torch.nn.functional as F

from specdec.model.layers import NormPair, OffsetRMSNorm, RMSNorm
from specdec.model.rope import Rope
from specdec.ops import native
from specdec.ops.rope_write import rope_write, rotate

pytestmark = pytest.mark.skipif(not native.has_rows(), reason="needs AVX2 or AVX-512, and a C++ compiler")
EPS = torch.finfo(torch.float32).eps


def norm_of(size: int) -> RMSNorm:
    norm = RMSNorm(size, 1e-5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    return norm


def calls(function, *inputs) -> set[str]:
    """The names of the operators that a function calls."""
    with torch.profiler.profile() as profile:
        function(*inputs)
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("size", [1, 5, 16, 640, 650])
@pytest.mark.parametrize("rows", [1, 3, 200])
@torch.no_grad()
def test_norms_are_the_formula(size, rows):
    torch.manual_seed(0)
    norm, x, y = norm_of(size), torch.randn(rows, size), torch.randn(rows, size)
    exact = F.rms_norm((x + y).double(), (size,), norm.weight.double(), norm.eps)
    total, normed = norm(y, x)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, norm(total))
    # A sum of `size` squares, a root, a division and two products are rounded.
    assert ((normed - exact).abs() <= exact.abs() * (size / 2 + 4) * EPS).all()
    assert all(torch.equal(norm(total[row]), normed[row]) for row in range(0, rows, 50))
    heads = torch.randn(rows, 9, size)[:, 2:7]  # which are not contiguous
    assert torch.equal(norm(heads), norm(heads.contiguous()))


@pytest.mark.parametrize("dim", [2, 64, 96])
@torch.no_grad()
def test_a_rotation_is_the_formula(dim):
    torch.manual_seed(0)
    cos, sin = (x[:30].view(2, 15, 1, dim) for x in Rope().tables(dim, 40))
    heads = torch.randn(2, 15, 7, dim)[:, :, 1:6]
    x, y = heads.double().chunk(2, -1)
    c, s = cos.double()[..., : dim // 2], sin.double()[..., dim // 2 :]
    exact = torch.cat([x * c - y * s, y * c + x * s], -1)
    # Two products of values of up to 5 are rounded, and their sum.
    torch.testing.assert_close(rotate(heads, cos, sin).double(), exact, rtol=0, atol=3 * 5 * EPS)
    assert torch.equal(rotate(heads[1:, 3:5], cos[1:, 3:5], sin[1:, 3:5]), rotate(heads, cos, sin)[1:, 3:5])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (5, 1, 96), (2, 2, 6)])
@pytest.mark.parametrize("norm", [None, RMSNorm, OffsetRMSNorm])
@torch.no_grad()
def test_heads_are_rotated_and_stored_in_one_call(heads, kv_heads, dim, norm):
    """The same bits as a norm, a rotation and a write called separately."""
    torch.manual_seed(0)
    cos, sin = (x[:30].view(2, 15, 1, dim) for x in Rope().tables(dim, 40))
    rows = torch.randn(30, heads + 2 * kv_heads, dim)
    norms = [None, None] if norm is None else [norm(dim, 1e-5) for _ in range(2)]
    for each in norms if norm else ():
        each.weight.uniform_(0.5, 2)
    keys, values = torch.full((2, 50, kv_heads * dim), 7.0)
    slots = torch.randperm(50)[:30]
    got = rope_write(rows, *norms)(rows, cos, sin, slots, keys, values)
    q, k, v = rows.view(2, 15, -1, dim).split([heads, kv_heads, kv_heads], 2)
    if norm:  # by their gains: Gemma's norm alone is not our own
        one = native.operator("rms_norm")
        q, k = (one(x, each.gain(), each.eps) for x, each in zip((q, k), norms, strict=True))
    assert torch.equal(got, rotate(q, cos, sin))
    assert torch.equal(keys[slots], rotate(k, cos, sin).reshape(30, -1))
    assert torch.equal(values[slots], v.reshape(30, -1))
    others = sorted(set(range(50)) - set(slots.tolist()))
    assert (keys[others] == 7).all()
    assert (values[others] == 7).all()
    with pytest.raises(RuntimeError, match="the cache has no slot 50"):
        rope_write(rows, *norms)(rows, cos, sin, torch.full((30,), 50), keys, values)


@torch.no_grad()
def test_two_norms_side_by_side():
    torch.manual_seed(0)
    first, second, x, y = norm_of(40), norm_of(40), torch.randn(2, 3, 40), torch.randn(2, 3, 40)
    pair = NormPair(first, second)
    assert torch.equal(pair(x, y), torch.cat([first(x), second(y)], -1))
    assert "specdec_rows::norm_pair" in calls(pair, x, y)


def test_only_what_does_not_learn_is_our_own():
    norm, x = norm_of(8), torch.randn(2, 8)
    assert not any(name.startswith("specdec_rows") for name in calls(norm, x))
    norm(x).sum().backward()
    assert norm.weight.grad.abs().min() > 0
    with torch.no_grad():
        assert "specdec_rows::rms_norm" in calls(norm, x)
        assert not any(name.startswith("specdec_rows") for name in calls(norm.bfloat16(), x.bfloat16()))
