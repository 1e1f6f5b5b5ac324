"""Our own operators of a round on the CPU, except for the forward: the same results as torch's operators."""

import pytest
import torch

from specdec.model.cache import KVCache
from specdec.ops import native
from specdec.ops.commit import reference
from specdec.ops.likely import top, top_logprobs
from specdec.sampling.draws import sample
from specdec.structs import DraftTree, Sampling
from specdec.trees.base import ancestors_of
from specdec.verify.walk import alive, follow, path_of

pytestmark = pytest.mark.skipif(not native.has_rows(), reason="needs AVX2 or AVX-512, and a C++ compiler")


PATHS = [[0, 2, 5, 6], [0, 1, 3, 0], [0, 0, 0, 0]]


@pytest.fixture(autouse=True)
def as_in_decoding():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


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


def random_tree(batch: int, nodes: int, steps: int) -> DraftTree:
    """Siblings carry different tokens, of few, so that draws are often met; every third node that may have one more
    child gets it."""
    parents, depth, tokens = [0], [0], [0]
    for _ in range(1, nodes):
        free = [j for j, deep in enumerate(depth) if deep < steps and parents[1:].count(j) < 3]
        at = max(free[len(free) // 3], parents[-1])  # breadth first
        tokens.append(parents[1:].count(at))
        parents.append(at)
        depth.append(depth[at] + 1)
    tokens, parents, depth = (torch.tensor([x] * batch) for x in (tokens, parents, depth))
    return DraftTree(tokens, parents, depth, ancestors_of(parents, steps), steps)


@pytest.mark.parametrize(("nodes", "steps"), [(1, 1), (2, 1), (12, 3), (40, 7)])
def test_a_walk_down_a_tree(nodes, steps):
    tree = random_tree(64, nodes, steps)
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
