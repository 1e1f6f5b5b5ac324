"""Targets with recurrent layers: chains are verified exactly, trees are refused by name."""

import copy

import pytest
import torch
from helpers import come_and_go, job, texts_of_transformers, tiny_target
from hybrids import HYBRIDS, hybrid_target

from specdec import Engine
from specdec.acceptance import Acceptance, AlongTexts
from specdec.drafters import mtp, ngram
from specdec.drafters.draft_model import DraftModel
from specdec.engine.memory import Request, plan
from specdec.engine.round import Round
from specdec.model.recurrent import BUDGET
from specdec.trees import Chain, DynamicTree
from specdec.tuning import choose
from specdec.verify import sample_and_match

VOCAB = 8  # few tokens, so that n-grams and heads that know nothing are right now and then
PROMPTS = [[3, 5, 7, 6, 3, 5, 7], [1], [(7 * i) % VOCAB for i in range(23)]]
NEW = 10


@pytest.fixture(scope="module", params=["each", "replay"])
def target(request, tmp_path_factory):
    """Random, of the Qwen3-Next type; with a state for each position, or with replay."""
    target = hybrid_target(tmp_path_factory.mktemp("hybrid"), vocab_size=VOCAB)
    target.state_budget = BUDGET if request.param == "each" else 0
    return target


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    return [decode(Engine(target), [prompt])[0].tokens for prompt in PROMPTS]


def decode(engine: Engine, prompts):
    return engine.generate(prompts, max_new_tokens=NEW, eos=frozenset()).rows


def hybrid_draft_model(target) -> DraftModel:
    """One with recurrent layers of its own, that often says what the target says."""
    torch.manual_seed(0)
    model = copy.deepcopy(target)
    with torch.no_grad():
        model.head.weight.add_(torch.randn_like(model.head.weight) * model.head.weight.std() / 2)
    return DraftModel(model)


DRAFTERS = {
    "mtp": (mtp.create, range(1, 9)),
    "ngram": (ngram.create, range(1, 9)),
    "draft-model": (lambda target: DraftModel(tiny_target(vocab=VOCAB)), range(1, 9)),
    "hybrid-draft-model": (hybrid_draft_model, (3,)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", DRAFTERS)
def test_chains_give_plain_text_alone_and_together(name, target, plain):
    create, chains = DRAFTERS[name]
    drafter, accepted, refused = create(target).eval(), 0, 0
    for steps in chains if target.state_budget else (3,):
        engine = Engine(target, drafter, Chain(steps))
        rows = decode(engine, PROMPTS)
        assert [row.tokens for row in rows] == plain
        if steps in (3, 8):
            assert [decode(engine, [prompt])[0].tokens for prompt in PROMPTS] == plain
        accepted += sum(sum(row.trace.accepted) for row in rows)
        refused += sum(steps - taken for row in rows for taken in row.trace.accepted)
    assert min(accepted, refused) > 0, "the test shows nothing"


@pytest.mark.parametrize("family", [family for family in HYBRIDS if family != "qwen3_next"])
def test_other_families(family, tmp_path):
    """Mamba among them, and layers with both a state and keys; plain text is that of transformers."""
    target = hybrid_target(tmp_path, family, vocab_size=VOCAB)
    expected = texts_of_transformers(target.model, PROMPTS, NEW)
    for engine in (Engine(target), Engine(target, ngram.create(target), Chain(4))):
        assert [row.tokens for row in decode(engine, PROMPTS)] == expected


def test_rows_join_late_and_leave_early(target):
    """Greedy and sampled rows have the text that each has alone."""
    jobs = [job(i, prompt=PROMPTS[i % 3], eos=frozenset()) for i in range(6)]
    come_and_go(Engine(target, ngram.create(target), Chain(3)), jobs, rows=3)


def test_trees_are_refused_by_name(target):
    with pytest.raises(ValueError, match=r"this target has recurrent layers, which take chains only.*take topk 1"):
        Engine(target, mtp.create(target).eval(), DynamicTree(2, 2, 5))
    with pytest.raises(ValueError, match="this draft model has recurrent layers"):
        Engine(tiny_target(vocab=VOCAB), DraftModel(target), DynamicTree(2, 2, 5))


def test_texts_that_share_a_row_are_refused(target):
    ids = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="'qwen3_next' has recurrent layers, which cannot keep texts of one row apart"):
        target(ids, None, documents=ids)


def test_memory_counts_the_states(target):
    rounds = Round(target, ngram.create(target), Chain(3), sample_and_match)
    states = sum(x.nbytes for state in target.states.values() for x in state.values())  # of one row
    one, two = (plan(rounds, Request(rows, 8, 32)).target_cache for rows in (1, 2))
    assert two - one > 2 * states > 0


@pytest.mark.matrix
@pytest.mark.parametrize("recurrent", ["target", "draft model"])
def test_what_is_chosen_by_acceptance_is_a_chain(target, recurrent, tmp_path, monkeypatch):
    """Acceptance is measured for several children of a node on any pair."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choose, "SECONDS", 0.1)
    monkeypatch.setattr(choose, "LAST_SECONDS", 0.1)
    attending = tiny_target(vocab=VOCAB)
    pair = (target, DraftModel(attending)) if recurrent == "target" else (attending, DraftModel(target))
    pair[1].acceptance = Acceptance((AlongTexts(0.0, 4, 3, ("012 3 01 - 0 000 -",) * 2),))
    choice = choose.choose_tree(*pair)
    assert choice.tree is None or choice.tree.topk == 1
