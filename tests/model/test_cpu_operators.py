"""Our own operators on the CPU, except for products and attention: the formula, or the bits of torch's operators."""

import pytest
import torch
import torch.nn.functional as F
from test_verify import random_tree

from specdec.model.cache import KVCache
from specdec.model.layers import NormPair, OffsetRMSNorm, RMSNorm
from specdec.model.rope import Rope
from specdec.ops import native
from specdec.ops.commit import reference
from specdec.ops.likely import top, top_logprobs
from specdec.ops.rope_write import rope_write, rotate
from specdec.sampling.filters import sample
from specdec.structs import Sampling
from specdec.verify.walk import alive, follow, path_of

pytestmark = [
    pytest.mark.skipif(not native.has_rows(), reason="needs AVX2 or AVX-512, and a C++ compiler"),
    pytest.mark.usefixtures("as_in_decoding"),
]
EPS = torch.finfo(torch.float32).eps
PATHS = [[0, 2, 5, 6], [0, 1, 3, 0], [0, 0, 0, 0]]


def norm_of(size: int) -> RMSNorm:
    norm = RMSNorm(size, 1e-5)
    norm.weight.uniform_(0.5, 2)
    return norm


def calls(function, *inputs) -> set[str]:
    """The names of the operators that a function calls."""
    with torch.profiler.profile() as profile:
        function(*inputs)
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("size", [1, 5, 16, 640, 650])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_norms_are_the_formula(size, rows):
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
def test_a_rotation_is_the_formula(dim):
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
def test_heads_are_rotated_and_stored_in_one_call(heads, kv_heads, dim, norm):
    """The same bits as a norm, a rotation and a write called separately."""
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


def test_two_norms_side_by_side():
    first, second, x, y = norm_of(40), norm_of(40), torch.randn(2, 3, 40), torch.randn(2, 3, 40)
    pair = NormPair(first, second)
    assert torch.equal(pair(x, y), torch.cat([first(x), second(y)], -1))
    assert "specdec_rows::norm_pair" in calls(pair, x, y)


def test_only_what_does_not_learn_is_our_own():
    norm, x = norm_of(8), torch.randn(2, 8)
    assert "specdec_rows::rms_norm" in calls(norm, x)
    with torch.enable_grad():
        assert not any(name.startswith("specdec_rows") for name in calls(norm, x))
        norm(x).sum().backward()
    assert norm.weight.grad.abs().min() > 0
    assert not any(name.startswith("specdec_rows") for name in calls(norm.bfloat16(), x.bfloat16()))


@pytest.mark.parametrize("size", [1, 7, 16, 1000, 8192])
@pytest.mark.parametrize("rows", [(1, 1), (2, 3), (40,)])
def test_the_likeliest_token(rows, size):
    logits = 5 * torch.randn(*rows, size)
    logits[..., size // 2 :: 3] = logits.amax()  # of equals the first
    logits[(0,) * len(rows)] = -torch.inf
    logits[(0,) * len(rows)][-1] = -3
    scores, ids = top(logits.double().log_softmax(-1), 1)
    got, tokens = top_logprobs(logits, 1)
    assert torch.equal(tokens, ids)
    torch.testing.assert_close(got.double(), scores, rtol=1e-6, atol=1e-6)
    assert torch.equal(sample(logits, Sampling(), None), ids[..., 0])
    assert all(torch.equal(top_logprobs(logits[:n], 1)[0], got[:n]) for n in range(1, len(logits)))


def test_logits_that_are_no_numbers_still_give_a_token():
    logits = torch.full((2, 50), torch.nan)
    assert 0 <= int(sample(logits, Sampling(), None)[0]) < 50
    assert 0 <= int(top_logprobs(logits, 1)[1][0]) < 50


@pytest.mark.parametrize("nodes", [1, 2, 12, 40])
def test_a_walk_down_a_tree(nodes):
    tree = random_tree(0, b=64, n=nodes, vocab=3)  # of few tokens, so that draws are often met
    drawn = torch.randint(0, 3, (64, nodes)) * torch.randint(0, 2, (64, nodes))
    verdict = follow(tree, drawn)
    path, n = path_of(tree, alive(tree, tree.tokens == drawn.gather(1, tree.parents)))
    assert torch.equal(verdict.path, path)
    assert torch.equal(verdict.n, n)
    assert torch.equal(verdict.tokens, drawn.gather(1, path))
    assert len(set(n.tolist())) >= min(nodes, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accepted_nodes_move_down_in_the_cache(dtype):
    """As torch's operators move them."""
    own, other = (KVCache(2, 3, 20, 2, 8, like=torch.zeros(0, dtype=dtype)) for _ in range(2))
    other.move = reference(other.memory)
    for memory, same in zip(own.memory, other.memory, strict=True):
        same.copy_(memory.normal_())
    before, (path, n) = own.layers[0].clone(), (torch.tensor(PATHS), torch.tensor([4, 3, 0]))
    for cache in (own, other):
        cache.lens.copy_(torch.tensor([4, 0, 16]))
        cache.commit(path, n, 20)
        assert cache.lens.tolist() == [8, 3, 16]
    for row, end in enumerate(own.lens.tolist()):
        assert all(torch.equal(a[:, row, :end], b[:, row, :end]) for a, b in zip(own.layers, other.layers, strict=True))
    assert not torch.equal(own.layers[0], before)
