"""Our own attention on the CPU: the formula, unseen slots, and bits that do not depend on other positions."""

from dataclasses import replace

import pytest
import torch
from helpers import tiny_target

from specdec.model.attention import CacheView
from specdec.model.cache import KVCache
from specdec.model.target import Target
from specdec.ops import attention, native
from specdec.ops.attention import DIMS, FEW, packed_mask, tree_attention, tree_mask
from specdec.trees.base import ancestors_of

pytestmark = [
    pytest.mark.skipif(not native.has_rows(), reason="needs AVX2 or AVX-512, and a C++ compiler"),
    pytest.mark.usefixtures("as_in_decoding"),
]
SLOTS = 80


def filled_cache(lens: list[int], kv_heads: int, dim: int, nodes: int) -> KVCache:
    """Rows of these lengths; slots that nothing may see hold NaN."""
    cache = KVCache(1, len(lens), SLOTS, kv_heads, dim, like=torch.zeros(0))
    cache.lens.copy_(torch.tensor(lens))
    cache.max_len = max(lens)
    cache.memory[0].normal_()
    for row, length in enumerate(lens):
        cache.memory[0][:, row, length + nodes :] = torch.nan
    return cache


def attended(cache: KVCache, q: torch.Tensor, nodes: int, ancestors=None, scale=None) -> torch.Tensor:
    """q [B,n,heads,Dh] at the last n of so many scratch slots."""
    where = cache.layers[0], cache.lens, cache.places, q.shape[1], nodes, ancestors
    function, seen = tree_attention(*where, depth=None, bound=cache.max_len, groups=1, window=None, scale=scale)
    assert seen is not None
    return function(q, *cache.heads[0])


def random_tree(batch: int, n: int, nodes: int) -> torch.Tensor:
    """ancestors [B,n,nodes]: each of the last n of `nodes` sees itself and some before it."""
    seen = torch.rand(batch, n, nodes) < 0.5
    itself = torch.arange(nodes - n, nodes)
    return (seen & (torch.arange(nodes) < itself[:, None])) | (torch.arange(nodes) == itself[:, None])


def by_formula(q, cache, ancestors, scale) -> torch.Tensor:
    """In fp64. NaN of unseen slots must not reach the sums, so these slots are emptied."""
    keys, values = (x.double().nan_to_num() for x in cache.heads[0])
    mask = packed_mask(tree_mask(cache.lens, ancestors, SLOTS), q.shape[2] // keys.shape[1], torch.float64)
    return attention.attend(q.double(), keys, values, mask, scale)


@pytest.mark.matrix
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (5, 1), (8, 2), (14, 2)])
@pytest.mark.parametrize(("n", "nodes"), [(1, 1), (3, 7), (16, 16), (33, 33)])
def test_it_is_the_formula(dim, heads, kv_heads, n, nodes):
    cache = filled_cache([0, 17, 37], kv_heads, dim, nodes)
    q, tree = torch.randn(3, n, heads, dim), random_tree(3, n, nodes)
    for scale in (None, 0.3):
        got = attended(cache, q, nodes, tree, scale)
        # Weights are right to a few units in the last place of their exponents, of which the largest is below 64 here.
        torch.testing.assert_close(got.double(), by_formula(q, cache, tree, scale), rtol=0, atol=3e-5)
    causal = torch.ones(nodes, nodes, dtype=torch.bool).tril()[-n:].expand(3, n, nodes)
    got = attended(cache, q, nodes)
    assert torch.equal(got, attended(cache, q, nodes, causal))


def test_a_row_that_has_ended_may_lie_behind_all_slots():
    cache = filled_cache([SLOTS - 2, SLOTS + 9], 2, 32, 2)
    assert attended(cache, torch.randn(2, 2, 4, 32), 2)[0].isfinite().all()


@pytest.mark.parametrize(
    ("n", "dim", "dtype", "window"),
    [
        (FEW + 1, 32, torch.float32, None),
        (1, 24, torch.float32, None),
        (1, 32, torch.bfloat16, None),
        (1, 32, torch.float32, 4),
    ],
)
def test_what_it_does_not_know_goes_to_torch(n, dim, dtype, window):
    cache = KVCache(1, 1, SLOTS, 2, dim, like=torch.zeros(0, dtype=dtype))
    cache.lens.fill_(20)
    cache.max_len = 20
    assert CacheView(cache, n, None, 2, depth=torch.arange(n)[None], window=window).seen is None


def random_target(**settings) -> Target:
    """All of whose operators are our own."""
    sizes = {"layers": 2, "hidden": 128, "intermediate": 512, "heads": 8, "head_dim": 16, "vocab": 200}
    target = Target(replace(tiny_target().config, **sizes | settings)).eval()
    for parameter in target.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn_like(parameter).mul(0.2).bfloat16())
        else:
            parameter.uniform_(0.5, 1.5)
    return target


@pytest.mark.parametrize("qk_norm", [False, True])
def test_an_attention_in_one_call_has_the_bits_of_its_operators(qk_norm, monkeypatch):
    target, tokens = random_target(qk_norm=qk_norm), torch.tensor([[3, 5, 7, 9]] * 2)
    tree = {"depth": torch.tensor([[0, 1, 1, 2]] * 2), "ancestors": ancestors_of(torch.tensor([[0, 0, 0, 1]] * 2), 2)}

    def forward() -> tuple[torch.Tensor, KVCache, set[str]]:
        cache = target.new_cache(2, SLOTS)
        target(torch.arange(10).view(2, 5), cache, prefill=True)
        cache.advance(torch.tensor([5, 3]), 5)
        with torch.profiler.profile() as profile:
            logits, _ = target(tokens, cache, **tree)
        return logits, cache, {event.key for event in profile.key_averages()}

    together, cache, called = forward()
    assert {"specdec_rows::attend_add", "specdec_rows::mlp_add"} <= called
    monkeypatch.setattr("specdec.model.attention.attend_add", lambda *parts: None)
    apart, other, called = forward()
    assert "specdec_rows::tree_attention" in called
    assert torch.equal(together, apart)
    assert all(torch.equal(own, one) for own, one in zip(cache.memory, other.memory, strict=True))


def test_a_tree_and_plain_decoding_see_the_same_logits():
    """Bit for bit, as products (`rows.cpp`) and norms do not depend on other rows either."""
    target = random_target()
    prompt, path, other = torch.arange(40)[None], [7, 99, 3], [50, 51]
    in_tree, alone = (target.new_cache(1, SLOTS) for _ in range(2))
    for cache in (in_tree, alone):
        target(prompt, cache, prefill=True)
        cache.lens += prompt.shape[1]
        cache.max_len = prompt.shape[1]
    tokens = torch.tensor([[path[0], other[0], path[1], other[1], path[2]]])  # slots 1 and 3 are of another branch
    parents = torch.tensor([[0, 0, 0, 1, 2]])
    ancestors, depth = ancestors_of(parents, 2), torch.tensor([[0, 1, 1, 2, 2]])
    logits, _ = target(tokens, in_tree, ancestors=ancestors, depth=depth)
    for node, token in zip((0, 2, 4), path, strict=True):
        one, _ = target(torch.tensor([[token]]), alone)
        alone.lens += 1
        alone.max_len += 1
        assert torch.equal(one[0, 0], logits[0, node])
