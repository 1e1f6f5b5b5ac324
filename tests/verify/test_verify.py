"""The verifier against a walk in plain Python, and the filters against those of transformers and at their limits."""

import itertools
import math
import random

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.children import Coupled
from specdec.drafters.vocab import DraftVocab
from specdec.sampling.filters import filtered_probs, sample, settings_of
from specdec.sampling.noise import Noise, bits_of, gumbel, hashes_of
from specdec.structs import DraftTree, Sampling, SamplingBatch
from specdec.trees.base import ancestors_of
from specdec.verify import sample_and_match


def random_tree(seed: int, b: int = 5, n: int = 12, vocab: int = 6) -> DraftTree:
    """Return trees of random shape with distinct siblings, breadth first."""
    rng, parents, tokens = random.Random(seed), [], []
    for _ in range(b):
        row, word = [0], [0]
        while len(row) < n:  # a parent that is not before the last one keeps the nodes breadth first
            row.append(rng.randint(row[-1], min(row[-1] + 3, len(row) - 1)))
            taken = [token for token, parent in zip(word[1:], row[1:-1], strict=True) if parent == row[-1]]
            word.append(rng.choice([token for token in range(vocab + n) if token not in taken][:vocab]))
        parents.append(row)
        tokens.append(word)
    parents, tokens = torch.tensor(parents), torch.tensor(tokens)
    ancestors = ancestors_of(parents, n)
    depth = ancestors.sum(-1) - 1
    return DraftTree(tokens, parents, depth, ancestors, int(depth.max()))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(20))
def test_greedy_verdict_equals_a_plain_walk(seed):
    tree = random_tree(seed)
    b, n = tree.tokens.shape
    logits = torch.randn(b, n, 18, generator=torch.Generator().manual_seed(seed))
    logits[..., 6:] -= 2  # make the drafted tokens likely
    verdict = sample_and_match(tree, logits, Sampling())
    for row in range(b):
        best = logits[row].argmax(-1).tolist()
        node, path, emitted = 0, [0], []
        while True:
            emitted.append(best[node])
            below = [c for c in range(1, n) if tree.parents[row, c] == node and tree.tokens[row, c] == best[node]]
            if not below:
                break
            node = below[0]
            path.append(node)
        count = int(verdict.n[row])
        assert count == len(path)
        assert verdict.path[row, :count].tolist() == path
        assert verdict.path[row, count:].sum() == 0
        assert verdict.tokens[row, :count].tolist() == emitted


SETTINGS = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product([0.5, 1.3], [0, 7], [1.0, 0.7], [0.0, 0.1])
]


@pytest.mark.matrix
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_filters_match_transformers(sampling):
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits.clone())
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    torch.testing.assert_close(filtered_probs(logits, sampling), scores.softmax(-1), rtol=1e-6, atol=1e-7)


def test_nonsense_is_refused():
    for name, value in (
        ("temperature", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", 2.0), ("top_k", -1), ("top_k", 5.0),
        ("repetition_penalty", 0.0), ("repetition_penalty", math.nan), ("presence_penalty", 2.5),
        ("frequency_penalty", -3), ("frequency_penalty", math.nan),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            Sampling(**({"temperature": 1.0} | {name: value}))
    with pytest.raises(ValueError, match="top_k"):
        Sampling(temperature=0.0, top_k=5)


@pytest.mark.matrix
@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_the_least_temperatures_are_greedy(temperature, filters):
    """Divided by them, logits are larger than any number."""
    logits = torch.randn(8, 1, 50, generator=torch.Generator().manual_seed(0)) * 3
    noise = Noise([(1, row) for row in range(8)], hashes_of(torch.arange(50))).after(torch.zeros(8).long())
    cold, warm = Sampling(temperature, **filters), Sampling(0.5)
    for sampling in (cold, SamplingBatch([cold] * 4 + [warm] * 4, logits.device)):
        assert torch.equal(sample(logits, sampling, noise)[:4], logits[:4].argmax(-1))
        assert filtered_probs(logits, sampling)[:4].amax(-1).eq(1).all()


@pytest.mark.parametrize("top_p", [1e-38, 1e-9, 1e-3])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_tiny_top_p_keeps_the_likeliest_token(top_p, mixed):
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    samplings = [Sampling(0.9, top_p=top_p), Sampling(0.7 if mixed else 0.9, top_p=top_p)]
    probs = filtered_probs(logits, settings_of(samplings, logits.device))
    assert torch.equal(probs, torch.nn.functional.one_hot(logits.argmax(-1), 50).float())


@pytest.mark.parametrize("trust", [0.5, 1.0])
def test_coupled_children_trust_the_drafter_as_far_as_it_says(trust):
    """log softmax of trust * logits / temperature + the target's own noise (`Coupled`)."""
    hashes = hashes_of(torch.arange(20))
    noise = Noise([(1, 2)], hashes).after(torch.tensor([4]), 3)
    logits = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(1))
    scores = Coupled(noise, Sampling(0.8), trust).scores(logits, DraftVocab(20), slice(0, 3))
    expected = (trust * logits / 0.8 + gumbel(bits_of(noise.keys, hashes))).log_softmax(-1)
    torch.testing.assert_close(scores, expected)
