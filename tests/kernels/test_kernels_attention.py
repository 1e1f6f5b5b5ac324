"""Tree attention against its formula in fp64."""

import pytest
import torch
from kernel_cases import close, in_dtypes, on_devices, roundings, sums

from specdec.kernels import tree_attention
from specdec.kernels.tree_attention import split_count
from trees.ancestors import ancestors_of

pytestmark = on_devices


def launch_all(bf16, ints) -> None:
    """What `kernel_compile` compiles. No launch runs, so the tensors may hold anything."""
    heads, kv_heads, dim, nodes, slots = 32, 8, 128, 60, 4096
    keys, values = bf16(2, 1, slots, kv_heads, dim).transpose(2, 3).unbind()
    ancestors = torch.zeros(1, nodes, nodes, dtype=torch.bool)
    tree_attention.launch(bf16(1, nodes, heads, dim), keys, values, ints(1), ancestors, nodes, splits=8)


def random_tree(batch: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ancestors [B,n,n] and depth [B,n] of random trees."""
    parents = torch.stack([(torch.rand(batch) * max(i, 1)).long() for i in range(n)], 1)
    ancestors = ancestors_of(parents, n)
    return ancestors, ancestors.sum(-1) - 1


def check(device, dtype, lens, n, heads, kv_heads, dim, *, slots=None, nodes=None, splits=None, causal=False, **how):
    """Compare on random inputs. Slots that no node may see hold NaN, so that reading one fails the test."""
    torch.manual_seed(0)
    batch, nodes = len(lens), nodes or n
    q = torch.randn(batch, n, heads, dim).to(dtype)
    lens = torch.tensor(lens)
    kv = torch.randn(2, batch, (slots or int(lens.max()) + nodes), kv_heads, dim).to(dtype)
    for row, length in enumerate(lens.tolist()):
        kv[:, row, length + nodes :] = torch.nan
    if causal:
        ancestors, depth = torch.ones(nodes, nodes, dtype=torch.bool).tril()[-n:].expand(batch, n, nodes), None
    else:
        ancestors, depth = random_tree(batch, nodes)
        ancestors, depth = ancestors[:, -n:], depth if n == nodes else None
    keys, values = kv.transpose(2, 3).unbind()
    wanted = tree_attention.reference(q.double(), keys.double(), values.double(), lens, ancestors, depth=depth, **how)
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
    score = sums(dim) * sizes + 4 * torch.finfo(torch.float32).eps * how.get("softcap", 0)
    allowed = values.double().nan_to_num(0).abs().max() * (2 * score + sums(keys.shape[2]) + roundings(dtype, 2))
    close(got.cpu(), wanted, allowed)


@in_dtypes
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (7, 1)])
def test_heads(device, dtype, dim, heads, kv_heads):
    check(device, dtype, [37], 5, heads, kv_heads, dim)


@in_dtypes
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("lens", [[0], [1, 0, 67], [64, 33], [128, 127]], ids=str)
def test_ragged_rows_and_splits(device, dtype, lens, splits):
    check(device, dtype, lens, 4, 4, 2, 32, splits=splits, slots=140)


@in_dtypes
@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 64])
def test_trees_of_several_words(device, dtype, n):
    check(device, dtype, [21, 3], n, 2, 1, 32)


@in_dtypes
@pytest.mark.parametrize("window", [1, 3, 200])
@pytest.mark.parametrize("splits", [1, 3])
def test_window(device, dtype, window, splits):
    check(device, dtype, [70, 9], 40, 2, 1, 32, window=window, splits=splits)


@in_dtypes
def test_softcap_and_scale(device, dtype):
    check(device, dtype, [40, 0], 6, 4, 2, 64, softcap=2.0, scale=0.3)
    check(device, dtype, [40, 0], 6, 4, 2, 64, softcap=30.0, window=7, splits=2)


@in_dtypes
@pytest.mark.parametrize(("n", "nodes"), [(1, 1), (3, 3), (40, 40), (2, 5)])
@pytest.mark.parametrize("window", [None, 4])
def test_causal(device, dtype, n, nodes, window):
    check(device, dtype, [30, 0], n, 4, 2, 32, nodes=nodes, causal=True, window=window if n == nodes else None)


@in_dtypes
def test_a_drafters_level_sees_earlier_levels(device, dtype):
    check(device, dtype, [11, 50], 4, 4, 2, 32, nodes=36)


def test_what_is_hidden_makes_a_difference(device):
    """The same comparison fails if attention is under another tree, so the tests above can fail."""
    torch.manual_seed(1)
    q, kv = torch.randn(1, 6, 2, 32), torch.randn(2, 1, 16, 1, 32)
    keys, values = (x.transpose(1, 2) for x in kv)
    ancestors, _ = random_tree(1, 6)
    wanted = tree_attention.reference(q.double(), keys.double(), values.double(), torch.tensor([10]), ancestors)
    for bit in range(5):
        wrong = ancestors.clone()
        wrong[0, 5, bit] ^= True
        inputs = (x.to(device) for x in (q, keys, values, torch.tensor([10]), wrong))
        with pytest.raises(AssertionError, match="more than rounding"):
            close(tree_attention.launch(*inputs, 6).cpu(), wanted, 1e-4)


def test_split_count(device):
    assert split_count(programs=8, slots=100_000, processors=132) == 33
    assert split_count(programs=1000, slots=100_000, processors=132) == 1
    assert split_count(programs=1, slots=700, processors=132) == 2
    assert split_count(programs=1, slots=0, processors=1) == 1
