"""Speculative decoding changes nothing: greedy token for token, sampled in distribution; every tree of conf/."""

import itertools

import pytest
import torch
from helpers import Credulous, pvalue_of_tokens_2_and_3, tiny_drafter, tiny_target

from specdec.engine.engine import Engine
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.verify import BlockVerification, MultiRoundRejection, SampleAndMatch, TwoThresholds, TypicalAcceptance

TREES = {
    "chain1": Chain(1),
    "chain4": Chain(4),
    "dynamic": DynamicTree(topk=3, steps=3, num_draft_tokens=10),
    "dynamic-whole-pool": DynamicTree(topk=2, steps=3, num_draft_tokens=11),
    "dynamic-topk1": DynamicTree(topk=1, steps=3, num_draft_tokens=4),
    "dynamic-one-level": DynamicTree(topk=4, steps=1, num_draft_tokens=4),
    "sampled-chain": SampledTree((1, 1, 1, 1)),
    "sampled": SampledTree((3, 2, 1)),
}
PROMPTS = [[3, 5, 7], [1], [2, 4, 6, 8, 10, 12, 14, 16, 1], [9, 9, 9, 9]]


@pytest.mark.matrix
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


SAMPLINGS = [
    Sampling(temperature=temperature, **filters)
    for temperature, filters in itertools.product(
        [0.5, 1.0], [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}]
    )
]


@pytest.mark.matrix
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
    engine = Engine(target, drafter, TREES[tree])
    result = engine.generate([prompt] * count, max_new_tokens=3, sampling=sampling, seed=7)
    assert pvalue_of_tokens_2_and_3(target, prompt, sampling, result) > 1e-3
    assert sum(a for row in result.rows for a in row.trace.accepted) > count / 20


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("tree", "verifier"), [("sampled", MultiRoundRejection()), ("sampled-chain", BlockVerification())], ids=str
)
@pytest.mark.parametrize("sampling", SAMPLINGS[4:], ids=lambda s: f"t{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}")
@torch.inference_mode()
def test_rules_that_know_q_follow_the_target(tree, verifier, sampling):
    target = tiny_target(vocab=11)
    engine = Engine(target, tiny_drafter(target, draft_vocab=8), TREES[tree], verifier)
    result = engine.generate([[3, 1, 4]] * 3000, max_new_tokens=3, sampling=sampling, seed=7)
    assert pvalue_of_tokens_2_and_3(target, [3, 1, 4], sampling, result) > 1e-3
    assert sum(a for row in result.rows for a in row.trace.accepted) > 3000 / 20


@pytest.mark.parametrize("verifier", [Credulous(), TwoThresholds(threshold_acc=0.7), TypicalAcceptance()], ids=str)
def test_the_chi_square_test_can_fail(verifier):
    """A broken verifier is found out, and so are lossy ones."""
    target, sampling = tiny_target(vocab=11), Sampling(temperature=1.0)
    engine = Engine(target, tiny_drafter(target, draft_vocab=8), TREES["dynamic"], verifier)
    result = engine.generate([[3, 1, 4]] * 4000, max_new_tokens=3, sampling=sampling, seed=7)
    assert pvalue_of_tokens_2_and_3(target, [3, 1, 4], sampling, result) < 1e-6


@pytest.mark.parametrize("tree", ["chain4", "dynamic"])
def test_the_context_ends_every_row_where_plain_decoding_ends_it(tree):
    """Rows run into the limit in different rounds; positions and slots near the end are as right as anywhere."""
    target = tiny_target(context=40)
    prompts = [[3] * 20, [5, 6], [1] * 39, [2] * 33]
    plain = [Engine(target).generate([p], max_new_tokens=100).rows[0] for p in prompts]
    fast = Engine(target, tiny_drafter(target), TREES[tree]).generate(prompts, max_new_tokens=100).rows
    assert [row.tokens for row in fast] == [row.tokens for row in plain]
    assert [row.finish for row in fast] == [row.finish for row in plain] == ["context"] * 4
    assert [len(row.prompt) + len(row.tokens) for row in fast] == [40] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_decodes(dtype):
    """No equality is promised there; every row must come to its end, and tokens be those of the vocabulary."""
    target = tiny_target().to(dtype)
    drafter = tiny_drafter(target).to(dtype)
    rules = [("dynamic", SampleAndMatch()), ("sampled", MultiRoundRejection()), ("sampled-chain", BlockVerification())]
    for (tree, rule), sampling in itertools.product(rules, (Sampling(), Sampling(temperature=1.0))):
        engine = Engine(target, drafter, TREES[tree], rule)
        rows = engine.generate(PROMPTS, max_new_tokens=20, sampling=sampling).rows
        assert all(len(row.tokens) == 20 and 0 <= min(row.tokens) <= max(row.tokens) < 17 for row in rows)
