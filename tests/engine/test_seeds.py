"""Sampled text is a function of prompt, settings and seed: speculative text is plain text, token for token, and a row's
neighbours, place and time change nothing. Noise that is keyed otherwise is found out."""

import functools

import pytest
import torch
from helpers import DRAFTERS, come_and_go, tiny_drafter, tiny_target
from hydra.utils import instantiate
from test_conf_matrix import DRAFTED, NAMES, fresh_drafter, load

from specdec import children
from specdec.drafters.draft_model import DraftModel
from specdec.engine.engine import Engine
from specdec.sampling.noise import Noise, RoundNoise
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, SampledTree, StaticTree

PROMPTS = [[3, 5, 7], [1], [2, 4, 6, 8, 10, 9, 7, 6, 1], [9, 9], [5], [8, 1, 8, 1, 8], [0, 2], [10, 3, 4, 4]]
LIMITS = [12, 7, 9, 1, 14, 10, 3, 12]
MIXED = [
    Sampling(0.5), Sampling(0.8), Sampling(1.0), Sampling(0.8, top_k=4), Sampling(1.0, top_p=0.8),
    Sampling(0.5, min_p=0.1), Sampling(), Sampling(1.0, repetition_penalty=1.3, presence_penalty=0.4),
]  # fmt: skip
ALIKE = {
    "warm": Sampling(1.0),
    "penalised": Sampling(0.8, top_k=6, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
}
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
    rows = [
        engine.generate([p], max_new_tokens=n, sampling=s, seed=[(seed, i)], eos=EOS).rows[0]
        for i, (p, n, s) in enumerate(zip(PROMPTS, LIMITS, samplings, strict=True))
    ]
    return [row.tokens for row in rows]


def texts(engine: Engine, samplings, seed: int = 3) -> list[list[int]]:
    return [row.tokens for row in engine.generate(PROMPTS, sampling=list(samplings), seed=seed, **HOW).rows]


@pytest.mark.matrix
@pytest.mark.parametrize(("drafter", "tree"), DRAFTED)
def test_sampled_text_is_plain_text(drafter, tree):
    """Every drafter and tree of conf/, B = 1 and ragged 8, settings alike and mixed, rows that join late and leave
    early."""
    target, policy = tiny_target(vocab=11), instantiate(load("tree", tree))
    engine = Engine(target, fresh_drafter(drafter, target), policy)
    for sampling in ALIKE.values():
        assert texts(engine, [sampling] * 8) == plain((sampling,) * 8)
    assert texts(engine, MIXED) == plain(tuple(MIXED))
    come_and_go(engine, JOBS, rows=3)
    late = Engine(target, engine.drafter, policy, overlap=True)
    come_and_go(late, [one | {"sampling": Sampling()} for one in JOBS], rows=3)
    alone = engine.generate(PROMPTS[2:3], max_new_tokens=9, sampling=MIXED[2], seed=[(3, 2)], eos=EOS)
    assert alone.rows[0].tokens == plain(tuple(MIXED))[2]


@pytest.mark.parametrize("kind", ["likeliest", "coupled", "drawn"])
def test_children_of_every_kind_give_the_same_text(kind):
    target = tiny_target(vocab=11)
    engine = Engine(target, tiny_drafter(target, draft_vocab=8), SampledTree((3, 2, 1)), children=kind)
    assert texts(engine, MIXED) == plain(tuple(MIXED))


def test_other_seeds_and_rows_draw_other_texts():
    assert plain((Sampling(1.0),) * 8) != plain((Sampling(1.0),) * 8, seed=4)
    engine = Engine(tiny_target(vocab=11))
    rows = engine.generate([PROMPTS[0]] * 6, max_new_tokens=12, sampling=Sampling(1.0), eos=frozenset()).rows
    assert len({tuple(row.tokens) for row in rows}) == 6
    same = engine.generate([PROMPTS[0]] * 2, max_new_tokens=12, sampling=Sampling(1.0), seed=[5, (5, 0)]).rows
    assert same[0].tokens == same[1].tokens


def test_a_text_that_is_cut_goes_on_as_it_would_have():
    """Position counts the prompt, so half of a text given as a prompt is continued by the other half."""
    engine, how = Engine(tiny_target()), {"sampling": Sampling(1.0), "eos": frozenset()}
    whole = engine.generate([[3, 5]], max_new_tokens=20, seed=[(1, 2)], **how).rows[0].tokens
    rest = engine.generate([[3, 5, *whole[:8]]], max_new_tokens=12, seed=[(1, 2)], **how).rows[0].tokens
    assert rest == whole[8:]


# A drafter that is the target sees what the target will draw.

TREES = {
    "chain": Chain(4),
    "dynamic": DynamicTree(2, 3, 11),
    "static": StaticTree([[0], [1], [0, 0], [0, 0, 0]]),
    "sampled": SampledTree((2, 1, 1)),
}


def missed(tree: str, temperature: float = 1.0) -> int:
    """Rounds of a drafter that is the target in which a draft was refused. The trees hold all first children."""
    target = tiny_target()
    engine = Engine(target, DraftModel(tiny_target()), TREES[tree], children="coupled")
    rows = engine.generate(PROMPTS, max_new_tokens=25, sampling=Sampling(temperature), eos=frozenset()).rows
    return sum(a < engine.policy.steps for row in rows for a in row.trace.accepted)


@pytest.mark.parametrize("tree", TREES)
def test_a_drafter_that_is_the_target_is_always_right(tree):
    assert missed(tree) == missed(tree, 0.7) == 0


# Broken on purpose


def by_node(self, depth=None):
    node = torch.zeros(1, 1, dtype=torch.int64) if depth is None else torch.arange(depth.shape[-1]).expand_as(depth)
    return type(self)(self.noise, self.root, depth.shape[-1] if depth is not None else 1).whole.gather(
        1, node[..., None].expand(*node.shape, self.whole.shape[-1])
    )


def further_on(self, logits, vocab, level):
    later = RoundNoise(self.noise.noise, self.noise.root + 1, self.noise.depths)
    return SCORES(replaced(self, later), logits, vocab, level)


def replaced(coupled, noise):
    return children.Coupled(noise, coupled.sampling, coupled.trust)


SCORES, INIT = children.Coupled.scores, Noise.__init__


def test_noise_keyed_by_node_is_found_out(monkeypatch):
    target = tiny_target(vocab=11)
    engine = Engine(target, tiny_drafter(target, draft_vocab=8), DynamicTree(3, 3, 9))
    expected = plain((ALIKE["warm"],) * 8)
    monkeypatch.setattr(RoundNoise, "at", by_node)
    assert texts(engine, [ALIKE["warm"]] * 8) != expected


def test_noise_keyed_by_place_in_the_batch_is_found_out(monkeypatch):
    by_place = lambda self, seeds, hashes: INIT(self, [(3, i) for i in range(len(seeds))], hashes)  # noqa: E731
    monkeypatch.setattr(Noise, "__init__", by_place)
    with pytest.raises(AssertionError):
        come_and_go(Engine(tiny_target(vocab=11, seed=9)), JOBS, rows=3)


def test_drafts_that_see_one_position_further_on_are_found_out(monkeypatch):
    monkeypatch.setattr(children.Coupled, "scores", further_on)
    assert missed("chain") > 20


def test_what_does_not_fit_is_refused():
    target = tiny_target()
    drafter = tiny_drafter(target)
    for kind, tree, message in (
        ("drawn", Chain(3), "drawn children need a tree that knows"),
        ("nearest", Chain(3), "children must be one of likeliest, coupled, drawn"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(target, drafter, tree, children=kind)
    rules = {name: instantiate(load("verifier", name)) for name in NAMES["verifier"]}
    with pytest.raises(ValueError, match="not coupled ones"):
        Engine(target, drafter, SampledTree((1, 1)), rules["block"], children="coupled")
    with pytest.raises(ValueError, match="draws by other noise than the target's"):
        Engine(target, drafter, Chain(2), rules["typical"], children="coupled")


def test_every_drafter_is_coupled_through_its_own_vocabulary():
    """Where half of the vocabulary is drafted, a coupled child is the one that the noise of its target id favours."""
    target = tiny_target()
    for kind in ("eagle3", "mtp", "medusa", "suffix"):
        drafter = DRAFTERS[kind](target)
        coupled, likeliest = (
            Engine(target, drafter, DynamicTree(3, 3, 9), children=how).generate(
                [[3, 5, 3, 5, 3]] * 30, max_new_tokens=10, sampling=Sampling(0.9), eos=frozenset()
            )
            for how in ("coupled", "likeliest")
        )
        assert [r.tokens for r in coupled.rows] == [r.tokens for r in likeliest.rows]
        taken = [sum(a for r in told.rows for a in r.trace.accepted) for told in (coupled, likeliest)]
        assert taken[0] > taken[1], kind
