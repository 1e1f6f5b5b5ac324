"""Tree attention against torch's attention under a dense mask, in fp64."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from kernel_cases import close, in_dtypes, on_devices, roundings, sums

from specdec.ops.attention import attend, packed_mask, tree_mask, window_mask
from specdec.ops.cuda import tree_attention
from specdec.ops.cuda.tree_attention import split_count
from specdec.trees.base import ancestors_of

pytestmark = [on_devices, pytest.mark.usefixtures("as_in_decoding")]


def random_tree(batch: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ancestors [B,n,n] and depth [B,n] of random trees."""
    parents = torch.stack([(torch.rand(batch) * max(i, 1)).long() for i in range(n)], 1)
    ancestors = ancestors_of(parents, n)
    return ancestors, ancestors.sum(-1) - 1


def formula(q, keys, values, lens, ancestors, depth=None, window=None, scale=None) -> torch.Tensor:
    """In fp64. Slots that no node sees may hold NaN, which must not be multiplied."""
    b, n, heads, _ = q.shape
    mask = tree_mask(lens, ancestors, keys.shape[2])
    if window is not None:
        depth = torch.arange(n).expand(b, n) if depth is None else depth
        mask &= window_mask(lens, depth, keys.shape[2], window)
    mask = packed_mask(mask, heads // keys.shape[1], torch.float64)
    return attend(q.double(), keys.double().nan_to_num(0), values.double().nan_to_num(0), mask, scale)


def check(device, dtype, lens, n, shape, slots=None, nodes=None, splits=None, causal=False, depth=None, **how):
    """Compare on random inputs. Slots that no node may see hold NaN, so that reading one fails the test."""
    batch, nodes, (heads, kv_heads, dim) = len(lens), nodes or n, shape
    q = torch.randn(batch, n, heads, dim).to(dtype)
    lens = torch.tensor(lens)
    kv = torch.randn(2, batch, (slots or int(lens.max()) + nodes), kv_heads, dim).to(dtype)
    for row, length in enumerate(lens.tolist()):
        kv[:, row, length + nodes :] = torch.nan
    if causal:
        ancestors, depth = torch.ones(nodes, nodes, dtype=torch.bool).tril()[-n:].expand(batch, n, nodes), None
    else:
        ancestors, own_depth = random_tree(batch, nodes)
        ancestors, depth = ancestors[:, -n:], own_depth if n == nodes else depth
    keys, values = kv.transpose(2, 3).unbind()
    wanted = formula(q, keys, values, lens, ancestors, depth, **how)
    got = tree_attention.launch(
        *(x.to(device) for x in (q, keys, values, lens)), None if causal else ancestors.to(device), nodes,
        depth=None if depth is None else depth.to(device), splits=splits, **how,
    )  # fmt: skip
    assert got.dtype == dtype
    # A score is off by as much as a sum of `dim` products of the sizes of q and k, and its weight by twice that in
    # relation, once itself and once in the sum of weights. Weights and the output are rounded to the dtype.
    present = keys.double().nan_to_num(0)
    packed = q.double().view(batch, n, kv_heads, -1, dim)
    sizes = torch.einsum("bnkgd,bksd->bnkgs", packed.abs(), present.abs()).max() * how.get("scale", dim**-0.5)
    error = 2 * sums(dim) * sizes + sums(keys.shape[2]) + roundings(dtype, 2)
    close(got.cpu(), wanted, values.double().nan_to_num(0).abs().max() * error)


def cases() -> Iterator[dict]:
    """Arguments of `check`."""
    for dim, (heads, kv_heads) in product([32, 64, 80, 96, 128], [(4, 4), (4, 2), (7, 1)]):
        yield {"lens": [37], "n": 5, "shape": (heads, kv_heads, dim)}
    for splits, lens in product([1, 2, 5], [[0], [1, 0, 67], [64, 33], [128, 127]]):
        yield {"lens": lens, "n": 4, "shape": (4, 2, 32), "splits": splits, "slots": 140}
    for n in (1, 2, 31, 32, 33, 64):
        yield {"lens": [21, 3], "n": n, "shape": (2, 1, 32)}
    for window, splits in product([1, 3, 200], [1, 3]):
        yield {"lens": [70, 9], "n": 40, "shape": (2, 1, 32), "window": window, "splits": splits}
    yield {"lens": [40, 0], "n": 6, "shape": (4, 2, 64), "scale": 0.3}
    for (n, nodes), window in [*product([(1, 1), (3, 3), (40, 40)], [None, 4]), ((2, 5), None)]:
        yield {"lens": [30, 0], "n": n, "shape": (4, 2, 32), "nodes": nodes, "causal": True, "window": window}
    # A drafter's level: all of its nodes are equally deep, and with a window earlier levels count as near as itself.
    for window, splits in product([None, 1, 9, 40], [1, 3]):
        level = {"nodes": 36, "depth": torch.full((2, 4), 9), "window": window, "splits": splits}
        yield {"lens": [11, 50], "n": 4, "shape": (4, 2, 32), **level}


@pytest.mark.matrix
@in_dtypes
@pytest.mark.parametrize("case", cases())
def test_it_is_the_formula(device, dtype, case):
    check(device, dtype, **case)


def test_queries_may_be_part_of_a_product(device):
    """Without the kernel that rotates, q is a slice of the rows of q, k and v; a drafter's mask is a slice too."""
    rows, kv = torch.randn(2, 5, 8, 32, device=device), torch.randn(2, 2, 30, 2, 32, device=device)
    keys, values = kv.transpose(2, 3).unbind()
    ancestors, lens = random_tree(2, 9)[0].to(device), torch.tensor([4, 20], device=device)
    q, own = rows[:, :, 2:6], ancestors[:, 4:, 2:]
    got = tree_attention.launch(q, keys, values, lens, own, 7)
    assert torch.equal(got, tree_attention.launch(q.contiguous(), keys, values, lens, own.contiguous(), 7))


def test_splits_are_few_and_run_at_once(device):
    """Bounds of the slots up to 131,072, for batches of one to 64 rows of 8 key heads, plain and with a tree."""
    assert split_count(programs=8, slots=100_000, processors=132, resident=1) == 16
    assert split_count(programs=1, slots=0, processors=1) == 1
    slots = sorted({*range(1, 2**17 + 1, 97), *(2**power + near for power in range(8, 18) for near in (-1, 0))})
    for programs in (8, 24, 32, 64, 96, 256, 512, 2048):
        splits = [split_count(programs, bound, processors=132) for bound in slots]
        assert splits == sorted(splits)
        assert len(set(splits)) <= 6
        assert all(count == 1 or programs * count <= 264 for count in set(splits))
        assert all(count == 1 or bound // count >= 256 for bound, count in zip(slots, splits, strict=True))
        assert 2 * programs * splits[-1] > 264, "half of the device stays empty"
