"""Sequences join a running batch and leave it. Texts do not change, and ended sequences leave no state."""

import gc

import pytest
from helpers import DRAFTERS, assert_as_alone, come_and_go, finish, job, tiny_drafter, tiny_target
from policies import Depths, Restless
from tape import Interpreted, Tape, live_bytes

from specdec.engine.adaptive import Fixed
from specdec.engine.engine import Engine
from specdec.engine.recorder import Recorder
from specdec.model.cache import KVCache
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree

PROMPTS = [[3, 5, 7, 2], [1], [4, 4, 9, 8, 7, 6, 1]]
TREE = DynamicTree(3, 3, 9)
WAYS = {
    "at once": dict,
    "overlapped": lambda: {"overlap": True},
    "carried": lambda: {"compact": False},
    "captured": lambda: {"graphs": Tape()},
    "compiled": lambda: {"graphs": Interpreted()},
    "adaptive": lambda: {"adaptive": Restless(3)},
    "captured, adaptive": lambda: {"adaptive": Depths(3), "graphs": Tape()},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_joins_has_the_text_that_it_has_alone(way, unpacked):
    """Rows have settings of their own, long prompts that are read in parts, and limits of drafted levels. fuzz.py draws
    further cases."""
    engine = Engine(tiny_target(), tiny_drafter(tiny_target()), TREE, **WAYS[way]())
    jobs = [
        job(i, prompt=job(i)["prompt"] * (1 + i % 9), logprobs=i % 3 > 0, steps=[None, 0, 1, 9][i % 4])
        for i in range(9)
    ]
    sequences, _ = come_and_go(engine, jobs, part=4)
    assert sum(sum(s.trace.accepted) for s in sequences) > 0
    for s in sequences:
        assert max(s.trace.accepted, default=0) <= (3 if s.steps is None else min(s.steps, 3))


@pytest.mark.parametrize("adaptive", [None, Fixed(2)], ids=["as asked", "adaptive"])
def test_a_chain_is_as_long_as_the_longest_that_a_row_wants(adaptive):
    for steps, nodes in ((0, 1), (1, 2)):
        engine = Engine(tiny_target(), tiny_drafter(tiny_target()), Chain(3), adaptive=adaptive)
        _, reports = come_and_go(engine, [job(i, steps=steps) for i in range(3)])
        assert {report.nodes for report in reports} == {nodes}


@pytest.mark.parametrize(("drafter", "overlap"), [("eagle3", True), ("suffix", True), ("draft-model", False)])
def test_memory_does_not_grow(drafter, overlap):
    """Over 160 sequences, some of which are aborted. One object left of each would be seen."""
    target = tiny_target(layers=1)
    engine = Engine(target, DRAFTERS[drafter](target), Chain(2), overlap=overlap)
    engine.reserve(4, 24)
    place, seen, last = [kv.data_ptr() for kv in engine.loop.batch.cache.memory], [], None
    gc.collect()
    gc.freeze()  # objects from before are not searched
    for number in range(160):
        last = engine.add([1 + number % 7, 3], max_new_tokens=1 + number % 9, eos=frozenset())
        engine.step()
        if number % 40 == 39:
            engine.abort(last)
            finish(engine)
            gc.collect()
            seen.append((live_bytes(objects := gc.get_objects()), len(objects)))
            del objects
    gc.unfreeze()
    assert [kv.data_ptr() for kv in engine.loop.batch.cache.memory] == place
    sizes, objects = zip(*seen[1:], strict=True)
    assert max(sizes) - min(sizes) <= (512 if overlap else 0)  # the buffers of the last reading
    assert max(objects) - min(objects) <= 100


@pytest.mark.parametrize("early", [True, False], ids=["before the first round", "between rounds"])
@pytest.mark.parametrize("drafter", [None, "eagle3", "lookup", "draft-model", "captured"])
def test_rows_go_on_after_a_prefill_fails(drafter, early, monkeypatch):
    target, how = tiny_target(), {}
    if drafter == "captured":
        drafter, how = "eagle3", {"graphs": Tape()}
    engine = Engine(target, *([DRAFTERS[drafter](target), Chain(2)] if drafter else []), **how)
    engine.reserve(3, 40)
    rows = [engine.add(PROMPTS[0], max_new_tokens=9, eos=frozenset())]
    for _ in range(0 if early else 2):
        engine.step()
    rows += [engine.add(prompt, max_new_tokens=9, eos=frozenset()) for prompt in PROMPTS[1:]]
    with monkeypatch.context() as patch:

        def fail(*_):
            patch.undo()
            raise MemoryError

        patch.setattr(KVCache, "advance", fail)
        with pytest.raises(MemoryError):
            finish(engine)
    for other in rows[1:]:
        engine.abort(other)
    finish(engine)
    assert_as_alone(target, rows[:1])


def test_a_trace_of_rows_that_join():
    target, recorder = tiny_target(), Recorder()
    engine = Engine(target, tiny_drafter(target, draft_vocab=8), TREE)
    engine.reserve(2, 40)
    rows = [engine.add(**job(i, (Sampling(),))) for i in range(6)]
    while (report := engine.step()) is not None:
        recorder(report)
    assert [(r.prompt, r.tokens, r.finish, r.trace) for r in recorder.trace.rows] == [
        (row.prompt, row.tokens, row.finish, row.trace) for row in rows
    ]


def test_what_does_not_fit_is_said():
    """Room is what was reserved. Captured rounds have more."""
    engine = Engine(tiny_target(), graphs=Tape())
    with pytest.raises(ValueError, match=r"nothing is reserved: call Engine\.reserve first"):
        engine.add([1])
    with pytest.raises(ValueError, match="room for 1 row of 1 token at least, got 0 of 5"):
        engine.reserve(0, 5)
    engine.reserve(1, 8)
    with pytest.raises(ValueError, match="the prompt has 8 tokens, room was reserved for 8, new ones included"):
        engine.add([1] * 8)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        engine.add([1], max_new_tokens=0)
    row = engine.add([1, 2], max_new_tokens=100, eos=frozenset())
    finish(engine)
    assert (len(row.tokens), row.finish) == (6, "context")
    assert engine.step() is None


def test_an_error_in_an_observer_ends_what_was_decoded():
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), Chain(2))
    with pytest.raises(KeyError):
        engine.generate([[1, 2]], max_new_tokens=9, eos=frozenset(), observer=lambda _: {}["no"])
    assert engine.step() is None
    assert engine.generate([[1, 2]], max_new_tokens=9, eos=frozenset()).rows[0].finish == "length"
    assert engine.loop is None, "caches live on when nothing is decoded"


def test_a_report_on_those_that_join_has_their_sampling():
    engine = Engine(tiny_target(), graphs=Tape())
    engine.reserve(3, 40)
    for sampling in (Sampling(), Sampling(0.5), Sampling(1.0, top_k=2)):
        row = engine.add([1, 2], max_new_tokens=20, sampling=sampling, eos=frozenset())
        while not (report := engine.step()).prefill:
            pass
        assert (report.rows, report.sampling) == ([row], sampling)
        engine.step()
