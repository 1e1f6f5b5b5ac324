"""Sequences join a running batch and leave it: nobody's text shows it, and nothing is kept of those that are gone."""

import gc

import pytest
from helpers import DRAFTERS, finish, tiny_drafter, tiny_target
from tape import Tape

from specdec.engine.engine import Engine
from specdec.engine.recorder import Recorder
from specdec.lab.load.books import live_bytes
from specdec.model.cache import KVCache
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree

PROMPTS = [[3, 5, 7, 2], [1], [4, 4, 9, 8, 7, 6, 1], [2, 2], [6, 1, 3], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]]
LIMITS = [9, 14, 3, 11, 1, 8]
EOS = frozenset({4})


def decode(engine: Engine, rows: int, arrive: list[int], room: int = 40, **how) -> list:
    """Decode PROMPTS, of which number i is added before step arrive[i], with `rows` rows."""
    engine.reserve(rows, room)
    sequences, step = [], 0
    while True:
        for i, when in enumerate(arrive):
            if when == step:
                own = {name: values[i] for name, values in how.items()}
                sequences.append(engine.add(PROMPTS[i], max_new_tokens=LIMITS[i], eos=EOS, **own))
        report = engine.step()
        step += 1
        if report is None and step > max(arrive):
            return sequences


def test_penalties_and_log_probabilities_of_those_that_join():
    """Every other sequence is penalised, the first is not: penalties begin when the second has joined."""
    target, heavy = tiny_target(), Sampling(repetition_penalty=1.7, frequency_penalty=0.9)
    how = {"sampling": [Sampling(), heavy] * 3, "logprobs": [False, True, True] * 2}
    plain = Engine(target)
    for overlap in (False, True):
        engine = Engine(target, tiny_drafter(target, draft_vocab=8), DynamicTree(3, 3, 9), overlap=overlap)
        for i, row in enumerate(decode(engine, 3, [0, 1, 2, 3, 3, 5], **how)):
            own = {name: values[i] for name, values in how.items()}
            expected = plain.generate([PROMPTS[i]], max_new_tokens=LIMITS[i], eos=EOS, **own).rows[0]
            assert (row.tokens, row.finish) == (expected.tokens, expected.finish)
            assert (row.logprobs is None) == (not how["logprobs"][i])
            assert row.logprobs is None or row.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapped"])
def test_one_that_is_aborted_leaves_its_row_to_another(overlap):
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), Chain(2), overlap=overlap)
    engine.reserve(1, 40)
    first, second, never = (engine.add(PROMPTS[i], max_new_tokens=20, eos=frozenset()) for i in (0, 1, 2))
    engine.abort(never)
    for _ in range(3):
        engine.step()
    assert first.tokens
    assert not second.tokens
    engine.abort(first)
    had = list(first.tokens)
    finish(engine)
    assert (first.tokens, first.finish, never.tokens, never.finish) == (had, "abort", [], "abort")
    expected = Engine(target).generate([PROMPTS[1]], max_new_tokens=20, eos=frozenset()).rows[0]
    assert (second.tokens, second.finish) == (expected.tokens, "length")
    assert had == Engine(target).generate([PROMPTS[0]], max_new_tokens=20, eos=frozenset()).rows[0].tokens[: len(had)]


def test_a_trace_of_rows_that_join():
    target, recorder = tiny_target(), Recorder()
    engine = Engine(target, tiny_drafter(target, draft_vocab=8), DynamicTree(3, 3, 9))
    engine.reserve(2, 40)
    rows = [engine.add(p, max_new_tokens=n, eos=EOS) for p, n in zip(PROMPTS, LIMITS, strict=True)]
    while (report := engine.step()) is not None:
        recorder(report)
    assert [(r.prompt, r.tokens, r.finish, r.trace) for r in recorder.trace.rows] == [
        (row.prompt, row.tokens, row.finish, row.trace) for row in rows
    ]


@pytest.mark.parametrize(
    ("drafter", "overlap"),
    [("eagle3", False), ("eagle3", True), ("suffix", True), ("draft-model", False)],
    ids=lambda value: {True: "overlapped", False: "at once"}.get(value, value),
)
def test_memory_does_not_grow(drafter, overlap):
    """Over 350 sequences, of which some are aborted. One object left of each would be seen."""
    target = tiny_target()
    engine = Engine(target, DRAFTERS[drafter](target), Chain(2), overlap=overlap)
    engine.reserve(4, 24)
    place = [kv.data_ptr() for kv in engine.loop.batch.cache.memory]
    seen, last = [], None
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
    assert [kv.data_ptr() for kv in engine.loop.batch.cache.memory] == place
    sizes, objects = zip(*seen[1:], strict=True)
    assert max(sizes) - min(sizes) <= (512 if overlap else 0)  # the buffers of what was read last
    assert max(objects) - min(objects) <= 200


def test_what_does_not_fit_is_said():
    engine = Engine(tiny_target())
    with pytest.raises(ValueError, match=r"nothing is reserved: call Engine\.reserve first"):
        engine.add([1])
    with pytest.raises(ValueError, match="room for 1 row of 1 token at least, got 0 of 5"):
        engine.reserve(0, 5)
    engine.reserve(1, 8)
    with pytest.raises(ValueError, match="the prompt has 8 tokens"):
        engine.add([1] * 8)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        engine.add([1], max_new_tokens=0)
    row = engine.add([1, 2], max_new_tokens=100, eos=frozenset())
    finish(engine)
    assert (len(row.tokens), row.finish) == (6, "context")
    assert engine.step() is None


def test_room_is_what_was_reserved_and_not_what_recorded_rounds_have_beside():
    target = tiny_target()
    for graphs in (False, Tape()):
        engine = Engine(target, graphs=graphs)
        engine.reserve(1, 20)
        row = engine.add([1, 2], max_new_tokens=100, eos=frozenset())
        finish(engine)
        assert (len(row.tokens), row.finish) == (18, "context")
        with pytest.raises(ValueError, match="the prompt has 20 tokens, room was reserved for 20, new ones included"):
            engine.add([1] * 20)


@pytest.mark.parametrize("drafter", [None, "eagle3", "lookup", "draft-model"])
@pytest.mark.parametrize("early", [True, False], ids=["before the first round", "between rounds"])
def test_rows_go_on_when_those_that_were_to_join_are_given_up(drafter, early, monkeypatch):
    target = tiny_target()
    engine = Engine(target, *([DRAFTERS[drafter](target), Chain(2)] if drafter else []))
    engine.reserve(3, 40)
    first = engine.add(PROMPTS[0], max_new_tokens=9, eos=frozenset())
    if not early:
        engine.step()
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
            engine.step()
    for other in others:
        engine.abort(other)
    finish(engine)
    expected = Engine(target).generate([PROMPTS[0]], max_new_tokens=9, eos=frozenset()).rows[0]
    assert first.tokens == expected.tokens


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
