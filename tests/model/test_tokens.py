"""What rounds do beside the forward by operators of our own on the CPU: the same as torch's operators do."""

import pytest
import torch

from specdec.kernels import commit
from specdec.model import native
from specdec.model.cache import KVCache
from specdec.sampling.draws import sample
from specdec.sampling.likely import top, top_logprobs
from specdec.structs import DraftTree, Sampling
from specdec.trees.ancestors import ancestors_of
from specdec.verify.walk import alive, follow, path_of

pytestmark = pytest.mark.skipif(not native.has_rows(), reason="needs AVX2 or AVX-512, and a C++ compiler")


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
    """Siblings carry different tokens, of few, so that draws are often met."""
    parents, tokens = torch.zeros(2, batch, nodes, dtype=torch.int64)
    depth = torch.zeros(batch, nodes, dtype=torch.int64)
    for b in range(batch):
        for i in range(1, nodes):
            open_nodes = [j for j in range(i) if depth[b, j] < steps and (parents[b, 1:i] == j).sum() < 3]
            at = open_nodes[len(open_nodes) // 3]
            at = max(at, int(parents[b, i - 1]))  # breadth first
            siblings = int((parents[b, 1:i] == at).sum())
            parents[b, i], depth[b, i], tokens[b, i] = at, depth[b, at] + 1, siblings
    return DraftTree(tokens, parents, depth, ancestors_of(parents, steps), steps)


@pytest.mark.parametrize(("nodes", "steps"), [(1, 1), (2, 1), (12, 3), (40, 7)])
def test_a_walk_down_a_tree(nodes, steps):
    tree, lengths = random_tree(64, nodes, steps), set()
    drawn = torch.randint(0, 3, (64, nodes)) * torch.randint(0, 2, (64, nodes))
    verdict = follow(tree, drawn)
    path, n = path_of(tree, alive(tree, tree.tokens == drawn.gather(1, tree.parents)))
    assert torch.equal(verdict.path, path)
    assert torch.equal(verdict.n, n)
    assert torch.equal(verdict.tokens, drawn.gather(1, path))
    lengths.update(n.tolist())
    assert len(lengths) >= min(nodes, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accepted_nodes_move_down_in_the_cache(dtype):
    cache = KVCache(2, 3, 20, 2, 8, like=torch.zeros(0, dtype=dtype))
    for memory in cache.memory:
        memory.normal_()
    cache.lens.copy_(torch.tensor([4, 0, 19]))
    path, n = torch.tensor([[0, 2, 5, 6], [0, 1, 3, 0], [0, 0, 0, 0]]), torch.tensor([4, 3, 0])
    wanted = [layer.clone() for layer in cache.layers]
    commit.reference(wanted, cache.lens.clone(), path, n)
    before = cache.layers[0].clone()
    cache.commit(path, n, 20)
    assert all(torch.equal(layer, own) for layer, own in zip(cache.layers, wanted, strict=True))
    assert not torch.equal(cache.layers[0], before)
    assert cache.lens.tolist() == [8, 3, 19]
