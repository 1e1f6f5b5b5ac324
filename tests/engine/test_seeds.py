"""Sampled text is a function of prompt, settings and seed. Speculative text is plain text, token for token. Neighbours,
place and time of a row change nothing."""

import functools

import pytest
import torch
from helpers import come_and_go, texts_of, tiny_drafter, tiny_target
from hydra.utils import instantiate
from test_conf_matrix import DRAFTED, fresh_drafter, load

from specdec import Engine, Sampling, children, make_verifier
from specdec.drafters.draft_model import DraftModel
from specdec.sampling.noise import Noise, RoundNoise
from specdec.trees import Chain, DynamicTree, SampledTree, StaticTree

PROMPTS = [[3, 5, 7], [1], [2, 4, 6, 8, 10, 9, 7, 6, 1], [9, 9], [5], [8, 1, 8, 1, 8], [0, 2], [10, 3, 4, 4]]
LIMITS = [12, 7, 9, 1, 14, 10, 3, 12]
MIXED = [
    Sampling(0.5), Sampling(0.8), Sampling(1.0), Sampling(0.8, top_k=4), Sampling(1.0, top_p=0.8),
    Sampling(0.5, min_p=0.1), Sampling(), Sampling(1.0, repetition_penalty=1.3, presence_penalty=0.4),
]  # fmt: skip
WARM = (Sampling(1.0),) * 8
EOS = frozenset({4})
JOBS = [
    {"prompt": prompt, "max_new_tokens": limit, "sampling": sampling, "seed": (3, i), "eos": EOS}
    for i, (prompt, limit, sampling) in enumerate(zip(PROMPTS, LIMITS, MIXED, strict=True))
]
HOW = {"max_new_tokens": LIMITS, "eos": EOS}


@functools.cache
def plain(samplings: tuple[Sampling, ...], seed: int = 3) -> list[list[int]]:
    """Each prompt alone, decoded plainly."""
    engine = Engine(tiny_target(vocab=11))
    return [
        texts_of(engine, [p], max_new_tokens=n, sampling=s, seed=[(seed, i)], eos=EOS)[0]
        for i, (p, n, s) in enumerate(zip(PROMPTS, LIMITS, samplings, strict=True))
    ]


def texts(engine: Engine, samplings) -> list[list[int]]:
    return texts_of(engine, PROMPTS, sampling=list(samplings), seed=3, **HOW)


@pytest.mark.matrix
@pytest.mark.parametrize(("drafter", "tree"), DRAFTED)
def test_sampled_text_is_plain_text(drafter, tree):
    """Every drafter and tree of conf/, settings alike and mixed, rows that join late and leave early."""
    target, policy = tiny_target(vocab=11), instantiate(load("tree", tree))
    engine = Engine(target, fresh_drafter(drafter, target), policy)
    for samplings in (WARM, tuple(MIXED)):
        assert texts(engine, samplings) == plain(samplings)
    come_and_go(engine, JOBS, rows=3)
    come_and_go(Engine(target, engine.drafter, policy, overlap=True), JOBS, rows=3)


def test_other_seeds_and_rows_draw_other_texts():
    assert plain(WARM) != plain(WARM, seed=4)
    engine = Engine(tiny_target(vocab=11))
    how = {"max_new_tokens": 12, "sampling": Sampling(1.0)}
    assert len(set(map(tuple, texts_of(engine, [PROMPTS[0]] * 6, eos=frozenset(), **how)))) == 6
    assert len(set(map(tuple, texts_of(engine, [PROMPTS[0]] * 2, seed=[5, (5, 0)], **how)))) == 1


def test_a_text_that_is_cut_goes_on_as_it_would_have():
    """The noise of a position counts the prompt, so half of a text as a prompt is continued by the other half."""
    engine, how = Engine(tiny_target()), {"sampling": Sampling(1.0), "eos": frozenset()}
    (whole,) = texts_of(engine, [[3, 5]], max_new_tokens=20, seed=[(1, 2)], **how)
    assert texts_of(engine, [[3, 5, *whole[:8]]], max_new_tokens=12, seed=[(1, 2)], **how) == [whole[8:]]


TREES = {
    "chain": Chain(4),
    "dynamic": DynamicTree(2, 3, 11),
    "static": StaticTree([[0], [1], [0, 0], [0, 0, 0]]),
    "sampled": SampledTree((2, 1, 1)),
}


def missed(tree: str, temperature: float = 1.0) -> int:
    """Count the rounds in which a drafter that is the target has a draft refused. Trees hold all first children."""
    engine = Engine(tiny_target(), DraftModel(tiny_target()), TREES[tree], children="coupled")
    rows = engine.generate(PROMPTS, max_new_tokens=25, sampling=Sampling(temperature), eos=frozenset()).rows
    return sum(a < engine.policy.steps for row in rows for a in row.trace.accepted)


@pytest.mark.parametrize("tree", TREES)
def test_a_drafter_that_is_the_target_is_always_right(tree, monkeypatch):
    """Unless its drafts see the noise of one position further on."""
    assert missed(tree) == missed(tree, 0.7) == 0
    scores = children.Coupled.scores

    def further_on(self, logits, vocab, level):
        later = RoundNoise(self.noise.noise, self.noise.root + 1, self.noise.depths)
        return scores(children.Coupled(later, self.sampling, self.trust), logits, vocab, level)

    monkeypatch.setattr(children.Coupled, "scores", further_on)
    assert missed(tree) > 20


def test_what_does_not_fit_is_refused():
    target = tiny_target()
    drafter = tiny_drafter(target)
    for kind, tree, rule, message in (
        ("drawn", Chain(3), "match", "drawn children need a tree that knows"),
        ("nearest", Chain(3), "match", "children must be one of likeliest, coupled, drawn"),
        ("coupled", SampledTree((1, 1)), "block", "not coupled ones"),
        ("coupled", Chain(2), "typical", "draws by other noise than the target's"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(target, drafter, tree, make_verifier(rule), children=kind)


def test_noise_keyed_by_place_is_found_out(monkeypatch):
    """By a node's place in its tree, or by a row's place in the batch."""
    target, init = tiny_target(vocab=11), Noise.__init__
    engine, expected = Engine(target, tiny_drafter(target, draft_vocab=8), DynamicTree(3, 3, 9)), plain(WARM)

    def by_node(self, depth=None):
        count = 1 if depth is None else depth.shape[-1]
        node = torch.arange(count).expand(len(self.root), count)
        whole = type(self)(self.noise, self.root, count).whole
        return whole.gather(1, node[..., None].expand(*node.shape, whole.shape[-1]))

    with monkeypatch.context() as patch:
        patch.setattr(RoundNoise, "at", by_node)
        assert texts(engine, WARM) != expected
    by_row = lambda self, seeds, hashes: init(self, [(3, i) for i in range(len(seeds))], hashes)  # noqa: E731
    monkeypatch.setattr(Noise, "__init__", by_row)
    with pytest.raises(AssertionError):
        come_and_go(Engine(tiny_target(vocab=11, seed=9)), JOBS, rows=3)
