"""Speculative decoding changes nothing: greedy token for token, sampled in distribution; every tree of conf/."""

import itertools

import pytest
import torch
from helpers import tiny_drafter, tiny_target
from scipy import stats

from specdec.engine import Engine
from specdec.sampling import filtered_probs
from specdec.types import Sampling
from trees import Chain, DynamicTree

TREES = {
    "chain1": Chain(1),
    "chain4": Chain(4),
    "dynamic": DynamicTree(topk=3, steps=3, num_draft_tokens=10),
    "dynamic-whole-pool": DynamicTree(topk=2, steps=3, num_draft_tokens=11),
    "dynamic-topk1": DynamicTree(topk=1, steps=3, num_draft_tokens=4),
    "dynamic-one-level": DynamicTree(topk=4, steps=1, num_draft_tokens=4),
}
PROMPTS = [[3, 5, 7], [1], [2, 4, 6, 8, 10, 12, 14, 16, 1], [9, 9, 9, 9]]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("draft_vocab", [None, 8])
def test_greedy_equals_plain(tree, draft_vocab):
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab=draft_vocab)
    plain = [Engine(target).generate([p], max_new_tokens=60).rows[0].tokens for p in PROMPTS]
    engine = Engine(target, drafter, TREES[tree])
    assert [engine.generate([p], max_new_tokens=60).rows[0].tokens for p in PROMPTS] == plain
    batch = engine.generate(PROMPTS, max_new_tokens=60)
    assert [row.tokens for row in batch.rows] == plain
    assert [row.tokens for row in Engine(target).generate(PROMPTS, max_new_tokens=60).rows] == plain
    assert sum(a for row in batch.rows for a in row.trace.accepted) > 0, "nothing was accepted: the test shows nothing"


def joint_of_tokens_2_and_3(target, prompt, sampling):
    """Exact joint distribution [V,V] of the second and third new token, the first summed out.

    The first comes from the prefill; these two come from trees, in one round or in two.
    """
    vocab = target.config.vocab
    pairs = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
    rows = torch.cat([torch.tensor([prompt]).expand(len(pairs), -1), pairs], 1)
    logits, _ = target(rows, None)
    first, second, third = (filtered_probs(logits[:, i], sampling).view(vocab, vocab, vocab) for i in (-3, -2, -1))
    # first[v1, v2, x] = p(x), second[v1, v2, x] = p(x | v1), third[v1, v2, x] = p(x | v1, v2)
    return torch.einsum("a,ab,abc->bc", first[0, 0], second[:, 0], third)


SAMPLINGS = [
    Sampling(temperature=temperature, **filters)
    for temperature, filters in itertools.product(
        [0.5, 1.0], [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}]
    )
]


@pytest.mark.parametrize("tree", ["chain4", "dynamic"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"t{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}")
@torch.inference_mode()
def test_sampled_output_follows_the_target(tree, sampling):
    """Chi-square on the joint of two tokens that trees decided.

    4000 rows with independent noise in one batch; the test fails by chance once in a thousand, and is seeded.
    """
    target = tiny_target(vocab=11)
    drafter = tiny_drafter(target, draft_vocab=8)
    prompt, count = [3, 1, 4], 4000
    result = Engine(target, drafter, TREES[tree]).generate(
        [prompt] * count, max_new_tokens=3, sampling=sampling, seed=7
    )
    seen = torch.zeros(11, 11)
    for row in result.rows:
        seen[tuple(row.tokens[1:])] += 1
    expected = joint_of_tokens_2_and_3(target, prompt, sampling) * count
    assert seen[expected == 0].sum() == 0, "a token was emitted that the filters exclude"
    observed, expected = merge_rare_cells(seen.flatten(), expected.flatten())
    assert len(observed) > 3
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3
    assert sum(a for row in result.rows for a in row.trace.accepted) > count / 20


def merge_rare_cells(seen, expected, least=5.0):
    """Cells with an expected count below `least` are counted together, as the chi-square approximation needs."""
    rare = expected < least
    keep = ~rare
    if expected[rare].sum() < least:
        return seen[keep].double().numpy(), expected[keep].double().numpy()
    pooled = [torch.cat([x[keep], x[rare].sum()[None]]).double().numpy() for x in (seen, expected)]
    return pooled[0], pooled[1]
