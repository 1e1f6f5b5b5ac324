"""Sequences join a running batch and leave it: nobody's text shows it, and nothing is kept of those that are gone."""

import gc

import pytest
import torch
from helpers import DRAFTERS, assert_as_alone, come_and_go, finish, job, tiny_drafter, tiny_target
from policies import Depths, Restless
from tape import Interpreted, Tape

from specdec.adaptive import Fixed
from specdec.engine.engine import Engine
from specdec.engine.recorder import Recorder
from specdec.model import cpu_linear
from specdec.model.cache import KVCache
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree

PROMPTS = [[3, 5, 7, 2], [1], [4, 4, 9, 8, 7, 6, 1]]
EOS = frozenset({4})
TREE = DynamicTree(3, 3, 9)
STEPS = [None, 0, 1, 2, 0, None, 9]
WAYS = {
    "at once": dict,
    "overlapped": lambda: {"overlap": True},
    "carried": lambda: {"compact": False},
    "captured": lambda: {"graphs": Tape()},
    "compiled": lambda: {"graphs": Interpreted()},
    "adaptive": lambda: {"adaptive": Restless(3), "overlap": True},
    "captured, adaptive": lambda: {"adaptive": Depths(3), "graphs": Tape()},
}
KINDS = (None, "mtp-two-heads-pre-norm", "medusa", "draft-model", "dflash", "lookup")


def jobs_of(what: str, count: int = 12) -> list[dict]:
    """Greedy texts, texts with settings of their own, long prompts, or rows that let fewer levels count."""
    if what == "greedy":
        return [job(i, (Sampling(),), eos=EOS) for i in range(count)]
    if what == "steps":
        return [job(i, steps=STEPS[i % 7]) for i in range(count)]
    long = what == "parts"
    return [job(i, prompt=job(i)["prompt"] * (1 + i % 9 * long), logprobs=i % 3 > 0) for i in range(count)]


def live_bytes(objects: list) -> int:
    """Return the bytes of the tensors among all objects of a process, without packed weights."""
    tensors = [x for x in objects if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.fixture
def unpacked(monkeypatch):
    """Weights as `Interpreted` takes them."""
    monkeypatch.setattr(cpu_linear, "pack", lambda weight: None)


@pytest.mark.parametrize("what", ["greedy", "mixed", "parts", "steps"])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_joins_has_the_text_that_it_has_alone(way, what, unpacked):
    """Five rows for twelve sequences. They come before the first round, between rounds, and when there is no room. A
    row accepts no more levels than it lets count."""
    engine = Engine(target := tiny_target(), tiny_drafter(target), TREE, **WAYS[way]())
    sequences, _ = come_and_go(engine, jobs_of(what), part=4 if what == "parts" else 0)
    assert sum(sum(s.trace.accepted) for s in sequences) > 0
    for s in sequences:
        assert max(s.trace.accepted, default=0) <= (3 if s.steps is None else min(s.steps, 3))


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["mixed", "parts", "steps"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_so_it_has_with_other_drafters(kind, way, what, unpacked):
    if (kind == "lookup" and ("captured" in way or way == "compiled")) or (kind is None and "adaptive" in way):
        pytest.skip("is refused")
    parts = [DRAFTERS[kind](tiny_target()), Chain(3)] if kind else []
    engine = Engine(tiny_target(), *parts, **WAYS[way]())
    come_and_go(engine, jobs_of(what, 7), part=4 if what == "parts" else 0)


@pytest.mark.parametrize("way", ["at once", "overlapped", "adaptive"])
def test_nothing_is_drafted_where_nobody_wants_it(way):
    """And a chain is as long as the longest that is wanted."""
    target = tiny_target()
    how = {"adaptive": Fixed(2)} if way == "adaptive" else WAYS[way]()
    for steps, nodes in ((0, 1), (1, 2)):
        engine = Engine(target, tiny_drafter(target), Chain(3), **how)
        _, reports = come_and_go(engine, [job(i, steps=steps) for i in range(3)])
        assert {report.nodes for report in reports} == {nodes}


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapped"])
def test_one_that_is_aborted_leaves_its_row_to_another(overlap):
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), Chain(2), overlap=overlap)
    engine.reserve(1, 40)
    first, second, never = (engine.add(prompt, max_new_tokens=20, eos=frozenset()) for prompt in PROMPTS)
    engine.abort(never)
    for _ in range(3):
        engine.step()
    assert first.tokens
    assert not second.tokens
    engine.abort(first)
    had = list(first.tokens)
    finish(engine)
    assert (first.tokens, first.finish, second.finish) == (had, "abort", "length")
    assert (never.tokens, never.finish) == ([], "abort")
    assert_as_alone(target, [first, second])


def test_a_trace_of_rows_that_join():
    target, recorder = tiny_target(), Recorder()
    engine = Engine(target, tiny_drafter(target, draft_vocab=8), TREE)
    engine.reserve(2, 40)
    rows = [engine.add(**one) for one in jobs_of("greedy", 6)]
    while (report := engine.step()) is not None:
        recorder(report)
    assert [(r.prompt, r.tokens, r.finish, r.trace) for r in recorder.trace.rows] == [
        (row.prompt, row.tokens, row.finish, row.trace) for row in rows
    ]


@pytest.mark.parametrize(
    ("drafter", "overlap"),
    [("eagle3", True), ("suffix", True), ("draft-model", False)],
    ids=lambda value: {True: "overlapped", False: "at once"}.get(value, value),
)
def test_memory_does_not_grow(drafter, overlap):
    """Over 350 sequences, of which some are aborted. One object left of each would be seen."""
    target = tiny_target()
    engine = Engine(target, DRAFTERS[drafter](target), Chain(2), overlap=overlap)
    engine.reserve(4, 24)
    place = [kv.data_ptr() for kv in engine.loop.batch.cache.memory]
    seen, last = [], None
    gc.collect()
    gc.freeze()  # what was there before is not looked through
    for number in range(350):
        last = engine.add([1 + number % 7, 3], max_new_tokens=1 + number % 9, eos=frozenset())
        engine.step()
        if number % 50 == 49:
            engine.abort(last)
            finish(engine)
            gc.collect()
            objects = gc.get_objects()
            seen.append((live_bytes(objects), len(objects)))
            del objects
    gc.unfreeze()
    assert [kv.data_ptr() for kv in engine.loop.batch.cache.memory] == place
    sizes, objects = zip(*seen[1:], strict=True)
    assert max(sizes) - min(sizes) <= (512 if overlap else 0)  # the buffers of what was read last
    assert max(objects) - min(objects) <= 200


@pytest.mark.parametrize("graphs", [False, Tape()], ids=["launched", "recorded"])
def test_what_does_not_fit_is_said(graphs):
    """Room is what was reserved, and not what recorded rounds have."""
    engine = Engine(tiny_target(), graphs=graphs)
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


@pytest.mark.parametrize(
    ("drafter", "graphs"),
    [(None, False), ("eagle3", False), ("lookup", False), ("draft-model", False), ("eagle3", True)],
)
@pytest.mark.parametrize("early", [True, False], ids=["before the first round", "between rounds"])
def test_rows_go_on_when_those_that_were_to_join_are_given_up(drafter, graphs, early, monkeypatch):
    target, graphs = tiny_target(), Tape() if graphs else False
    engine = Engine(target, *([DRAFTERS[drafter](target), Chain(2)] if drafter else []), graphs=graphs)
    engine.reserve(3, 40)
    first = engine.add(PROMPTS[0], max_new_tokens=9, eos=frozenset())
    for _ in range(0 if early else 2):
        engine.step()
    others = [engine.add(PROMPTS[i], max_new_tokens=9, eos=frozenset()) for i in (1, 2)]
    fails, advance = [True], KVCache.advance

    def failing(*args):
        if fails and fails.pop():
            raise MemoryError
        advance(*args)

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "advance", failing)
        with pytest.raises(MemoryError):
            finish(engine)  # what runs is read first
    for other in others:
        engine.abort(other)
    finish(engine)
    assert_as_alone(target, [first])


def test_an_error_in_an_observer_ends_what_was_decoded():
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), Chain(2))
    with pytest.raises(KeyError):
        engine.generate([[1, 2]], max_new_tokens=9, eos=frozenset(), observer=lambda _: {}["no"])
    assert engine.step() is None
    assert engine.generate([[1, 2]], max_new_tokens=9, eos=frozenset()).rows[0].finish == "length"
    assert engine.loop is None, "caches live on when nothing is decoded"


@pytest.mark.parametrize("graphs", [False, Tape()], ids=["launched", "recorded"])
def test_a_report_on_those_that_join_has_their_sampling(graphs):
    engine = Engine(tiny_target(), graphs=graphs)
    engine.reserve(3, 40)
    for sampling in (Sampling(), Sampling(0.5), Sampling(1.0, top_k=2)):
        row = engine.add([1, 2], max_new_tokens=20, sampling=sampling, eos=frozenset())
        while not (report := engine.step()).prefill:
            pass
        assert (report.rows, report.sampling) == ([row], sampling)
        engine.step()


# Drafters that guess a block in one forward
