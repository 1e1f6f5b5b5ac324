"""Rows that have ended are dropped from the rounds that follow; rows, traces and reports do not show it."""

from types import SimpleNamespace

import pytest
import torch
from helpers import DRAFTERS, pvalue_of_tokens_2_and_3, tiny_drafter, tiny_target
from test_batches import HEAVY, SETTINGS, TREES, After, ragged
from test_overlap import SAMPLED, assert_same, outcome

from specdec.engine import batch as batches
from specdec.engine.batch import Batch
from specdec.engine.engine import Engine
from specdec.engine.sequence import Sequence
from specdec.model.cache import KVCache
from specdec.structs import Sampling, Survivors
from specdec.trees import Chain
from specdec.verify import make_verifier

EOS = frozenset([11])


@pytest.fixture(params=[0.0, batches.PRICE], ids=["at once", "by the rule"])
def price(request, monkeypatch) -> float:
    """At price 0 rows are dropped as soon as they are known to have ended."""
    monkeypatch.setattr(batches, "PRICE", request.param)
    return request.param


class Forwards:
    """How many rows each forward of a target computed, the prefill's aside."""

    def __init__(self, target):
        self.rows: list[int] = []
        self.hook = target.register_forward_pre_hook(lambda _, args: self.rows.append(len(args[0])))

    def of(self, engine: Engine, *args, **how) -> tuple[list[Sequence], list[int]]:
        self.rows.clear()
        rows = engine.generate(*args, **how).rows
        return rows, self.rows[1:]


# What is computed


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drafter", [None, "eagle3", "lookup", "draft-model"])
def test_rows_that_have_ended_are_not_computed(drafter, late):
    """Of 16 rows all but one end in the second round. That is read when the third is under way, if rounds are read
    late, and acted on from the fourth on in either case."""
    target = tiny_target()
    engine = Engine(target, *([DRAFTERS[drafter](target), Chain(1)] if drafter else []), overlap=late)
    limits = [2] * 16
    limits[5] = 20
    rows, computed = Forwards(target).of(engine, [[3, 1]] * 16, max_new_tokens=limits, eos=frozenset())
    assert [len(row.tokens) for row in rows] == limits
    assert computed[:2] == [16, 16]
    assert set(computed[2:]) == {1}
    assert 0 <= len(computed) - rows[5].trace.rounds <= late  # a round that was launched in vain


@pytest.mark.parametrize("size", [2, 7, 32])
def test_what_is_carried_is_bounded(size):
    """No more than the price for each time that rows are dropped, and the round in which their end is not known yet."""
    target = tiny_target()
    prompts, limits = ragged(size)
    rows, computed = Forwards(target).of(Engine(target), prompts, max_new_tokens=limits, eos=EOS)
    alive = [sum(row.trace.rounds > r for row in rows) for r in range(len(computed))]  # before round r
    before, carried = size, 0.0
    for r, count in enumerate(computed):
        carried = carried if count == before else 0.0
        carried += 1 - alive[max(r - 1, 0)] / count
        assert carried < batches.PRICE
        before = count
    assert computed[-1] < size


def test_a_row_alone_and_rows_that_end_together_are_left_alone(monkeypatch):
    monkeypatch.setattr(Batch, "_drop", lambda _, ended: any(ended) and pytest.fail("nothing is to be dropped"))
    engine = Engine(tiny_target())
    engine.generate([[3, 1]], max_new_tokens=9)
    engine.generate([[3, 1]] * 4, max_new_tokens=9, eos=frozenset())
    Engine(tiny_target(), compact=False).generate([[3, 1]] * 4, max_new_tokens=[2, 2, 2, 9], eos=frozenset())


# What comes of it


def requests(size: int) -> dict:
    """Greedy rows that differ in everything: every third under penalties, every fourth with a stop of its own."""
    prompts, limits = ragged(size)
    sampling = [HEAVY if i % 3 == 1 else Sampling() for i in range(size)]
    return {"prompts": prompts, "max_new_tokens": limits, "sampling": sampling, "eos": EOS, "logprobs": True}


def stops(size: int) -> list[After | None]:
    return [After(4 + i) if i % 4 == 2 else None for i in range(size)]


CASES = [(drafter, "dynamic") for drafter in DRAFTERS] + [("eagle3", "chain"), ("eagle3", "sampled"), (None, "chain")]


@pytest.mark.matrix
@pytest.mark.parametrize(("drafter", "tree"), CASES)
def test_rows_traces_and_reports_are_those_of_rows_that_are_carried(drafter, tree, price):
    """Text and log-probabilities, what every round emitted, and its trees, verdicts and logits."""
    target, size = tiny_target(), 6
    parts = [DRAFTERS[drafter](target), TREES[tree]] if drafter else []
    told = [
        outcome(Engine(target, *parts, compact=compact), **requests(size), stop=stops(size))
        for compact in (True, False)
    ]
    assert_same(*told)
    assert {finish for _, finish, _ in told[0][0]} >= {"length", "stop"}
    assert len(told[0][2][-1][0]) < size, "nothing was dropped: the test shows nothing"


@pytest.mark.parametrize("tree", TREES)
def test_loops_drop_the_same_rows_before_the_same_rounds(tree):
    """So they draw the same numbers. A stop is known to late reading as late as to the other loop."""
    target = tiny_target()
    parts = tiny_drafter(target, draft_vocab=8), TREES[tree]
    how = requests(6) | {"sampling": [SAMPLED, Sampling(1.0, presence_penalty=0.5), Sampling()] * 2}
    told = [outcome(Engine(target, *parts, overlap=late), **how, stop=stops(6)) for late in (True, False)]
    assert [seen[0] for seen in told[0][2]] == [seen[0] for seen in told[1][2]]
    assert_same(*told)
    assert len(told[0][2][-1][0]) < 6


def test_rows_follow_their_own_laws_after_others_were_dropped(monkeypatch):
    """Half of the rows end with the prefill and are dropped before the first round; tokens 2 and 3 of the others follow
    their exact joint law, for two settings by turns. By chance a p-value fails once in a thousand; draws are seeded."""
    monkeypatch.setattr(batches, "PRICE", 0.0)
    target, kinds = tiny_target(vocab=11), SETTINGS[1:]
    engine = Engine(target, tiny_drafter(target, draft_vocab=8), TREES["sampled"], make_verifier("rejection"))
    sampling = [Sampling(), kinds[0], kinds[1], Sampling(1.0)] * 700
    how = {"max_new_tokens": [1, 3, 3, 1] * 700, "sampling": sampling, "seed": 5, "eos": frozenset()}
    rows, computed = Forwards(target).of(engine, [[3, 1, 4]] * 2800, **how)
    assert max(computed) == 1400
    for kind, setting in enumerate(kinds, 1):
        own = [row for row in rows[kind::4] if len(row.tokens) == 3]
        assert len(own) == 700
        assert pvalue_of_tokens_2_and_3(target, [3, 1, 4], setting, SimpleNamespace(rows=own)) > 1e-3


# The cache


@pytest.mark.parametrize("ended", ["01000", "11000", "00011", "10110", "11111", "00000", ""])
def test_only_as_many_rows_move_as_have_ended_before_those_that_go_on(ended):
    over = [c == "1" for c in ended]
    kept = Survivors(over, torch.device("cpu"))
    assert sorted(kept.rows) == [row for row, gone in enumerate(over) if not gone]
    assert kept.index.tolist() == kept.of(list(range(len(over)))) == kept.rows
    places = [place for place, row in enumerate(kept.rows) if place != row]
    assert [place for _, place in kept.moves] == places == [p for p in range(kept.count) if over[p]]
    assert [row for row, _ in kept.moves] == [kept.rows[place] for place in places]


@torch.inference_mode()
def test_the_rows_of_a_cache_move_in_its_own_memory():
    g = torch.Generator().manual_seed(0)
    cache = KVCache(layers=2, rows=5, slots=9, kv_heads=2, head_dim=3, like=torch.empty(0))
    for kv in cache.layers:
        kv.copy_(torch.randn(kv.shape, generator=g))
    cache.lens += torch.tensor([4, 9, 2, 6, 3])
    cache.max_len = 6
    before, memory = [kv.clone() for kv in cache.layers], [kv.data_ptr() for kv in cache.layers]
    cache.compact(Survivors([False, True, False, True, False], torch.device("cpu")))
    index = torch.tensor([0, 4, 2])
    assert cache.lens.tolist() == [4, 3, 2]
    assert (cache.batch, cache.slots) == (3, 9)
    assert [kv.data_ptr() for kv in cache.layers] == memory
    for layer, (kv, old) in enumerate(zip(cache.layers, before, strict=True)):
        assert torch.equal(kv[:, :, :6], old[:, index, :6])
        assert torch.equal(cache.read(layer, 0, 6)[1], old[1, index, :6].transpose(1, 2))
    new = torch.randn(3, 2, 2, 3, generator=g)
    cache.write(1, cache.slots_of(torch.arange(2)), new, -new)
    assert torch.equal(cache.layers[1][0, 1, 3:5], new[1])
    assert torch.equal(cache.layers[1][1, 2, 2:4], -new[2])
