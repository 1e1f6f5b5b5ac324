"""Recorded rounds of as many rows as decode, and of as many levels as an adaptive policy wants: the tape stands in for
a CUDA graph."""

from itertools import pairwise

import pytest
from helpers import DRAFTERS, MIXED, come_and_go, finish, job, tiny_drafter, tiny_target
from policies import Depths
from tape import Interpreted, Tape

from specdec import calibrate
from specdec.adaptive import Curve, Ema, Fixed, Outcome, Table
from specdec.api import generate
from specdec.calibrate import Crowd, adaptive_engine, prepare
from specdec.engine.engine import Engine
from specdec.engine.graphs import widths_up_to
from specdec.engine.guide import Guide
from specdec.engine.report import Reads
from specdec.model import cpu_linear
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, StaticTree

TREES = {
    "chain": Chain(3),
    "dynamic": DynamicTree(3, 3, 9),
    "static": StaticTree([[0], [1], [0, 0], [0, 1], [0, 0, 0]]),
}
KINDS = ("eagle3", "mtp-two-heads-pre-norm", "medusa", "draft-model", "dflash")
ROUNDS = [*((kind, (None,)) for kind in (None, *KINDS)), *((kind, MIXED) for kind in (None, "eagle3", "draft-model"))]
CASES = [*((kind, "dynamic", (None,)) for kind in KINDS), ("eagle3", "static", MIXED), ("draft-model", "chain", MIXED)]


class Watched(Tape):
    """Also knows how many rows its records are of."""

    def __init__(self):
        super().__init__()
        self.rows: list[int] = []

    def capture(self, run, kept, bound):
        replay, rows = super().capture(run, kept, bound), len(kept[0])

        def watched(bound):
            self.rows.append(rows)
            return replay(bound)

        return watched


def test_numbers_of_rows_that_rounds_are_recorded_for():
    assert [widths_up_to(rows) for rows in (1, 2, 3, 4, 5, 8)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8],
    ]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "samplings"), ROUNDS)
def test_rounds_have_the_rows_that_decode(kind, samplings):
    """Each round is of the least width that holds them. The text is plain decoding's, and as many tokens are accepted
    as in launched rounds: the drafter's state moves with its rows."""
    target, tape = tiny_target(), Watched()
    parts = (DRAFTERS[kind](target), TREES["dynamic"]) if kind else ()
    engine = Engine(target, *parts, graphs=tape)
    jobs = [job(i, samplings) for i in range(12)]
    sequences, _ = come_and_go(engine, jobs, abort=6)
    assert {s.finish for s in sequences} >= {"length", "abort"}
    launched, _ = come_and_go(Engine(target, *parts, overlap=True), jobs, abort=6)
    assert [s.trace.accepted for s in sequences] == [s.trace.accepted for s in launched]
    assert set(tape.rows) == {1, 2, 4, 5}
    assert {before < after for before, after in pairwise(tape.rows) if before != after} == {True, False}


def test_without_compact_all_rows_are_carried():
    target, tape = tiny_target(), Watched()
    come_and_go(Engine(target, tiny_drafter(target), Chain(2), graphs=tape, compact=False), [job(i) for i in range(6)])
    assert set(tape.rows) == {5}


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "tree", "samplings"), CASES)
def test_a_policy_chooses_the_levels_of_recorded_rounds(kind, tree, samplings, monkeypatch):
    """The text is plain decoding's, and as many tokens are accepted as in launched rounds: what plain rounds have left
    to the drafter is absorbed."""
    target, held, admit = tiny_target(), [], Guide.admit

    def watched(self, *given):
        state = admit(self, *given)
        held.append(self.joining is not None)
        return state

    monkeypatch.setattr(Guide, "admit", watched)
    drafter, traces = DRAFTERS[kind](target), []
    for graphs in (Watched(), False):
        policy = Depths(3)
        engine = Engine(target, drafter, TREES[tree], graphs=graphs, adaptive=policy, overlap=True)
        sequences, _ = come_and_go(engine, [job(i, samplings) for i in range(12)])
        assert {outcome.levels for outcome in policy.outcomes} == {0, 1, 2, 3}
        traces.append([(s.trace.accepted, s.trace.emitted) for s in sequences])
    assert traces[0] == traces[1]
    assert sum(sum(accepted) for accepted, _ in traces[0]) > 0
    assert set(held) == ({True, False} if drafter.cache is not None else {False})


def measured_engine(name: str, eos: frozenset[int] = frozenset(), **how) -> Engine:
    target = tiny_target()
    target.eos = eos
    return adaptive_engine(name, Crowd(5, 200), target, tiny_drafter(target), Chain(3), **how)


@pytest.mark.parametrize("name", ["ema", "table"])
def test_costs_are_measured_with_the_records_that_are_played_later(name, tmp_path, monkeypatch):
    """Of each number of rows plain rounds, and those of the whole tree: what is compiled drafts all levels or none.
    Behind that nothing more is recorded for greedy texts, whatever ends them. The next engine finds the costs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("specdec.calibrate.BUSY", 1e9)
    monkeypatch.setattr(cpu_linear, "pack", lambda weight: None)  # as an interpreted graph takes weights
    engine = measured_engine(name, frozenset({7}), graphs=Interpreted())
    assert (engine.adaptive.name, engine.adaptive.curve.choices) == (name, [0, 3])
    assert sorted(engine.adaptive.curve.rest) == [1, 2, 4, 5]
    made, levels = engine.graphs.backend.made, set()
    assert len(made) == 8
    for eos in (None, frozenset(), frozenset({4})):
        engine.reserve(5, 200, reads=Reads.TOKENS)
        for i in range(4):
            engine.add([1 + i, 2], max_new_tokens=20 + 5 * i, eos=eos)
        while (report := engine.step()) is not None:
            levels.add(report.nodes - 1)
    assert levels <= {0, 3}
    assert len(made) == 8
    monkeypatch.setattr("specdec.calibrate.measure_recorded_curve", None)
    again = measured_engine(name, frozenset({7}), graphs=Interpreted())
    assert again.adaptive.curve.rest == engine.adaptive.curve.rest


def test_captured_rounds_may_draft_any_number_of_levels():
    engine = measured_engine("ema", graphs=Tape())
    assert engine.adaptive.curve.choices == [0, 1, 2, 3]
    come_and_go(engine, [job(i, (None,)) for i in range(6)])
    assert measured_engine("table:1=2,3=0", graphs=Tape()).adaptive.curve is None
    assert measured_engine("survival").graphs is None
    with pytest.raises(ValueError, match="'survival' leaves out nodes"):
        measured_engine("survival", graphs=Tape())


def test_a_level_that_may_not_be_chosen_is_not():
    curve = Curve([1], {1: [1.0, 0.1, 0.1, 1.0]}, {1: dict.fromkeys((1, 2, 3, 4), 0.0)}, only=[0, 3])
    assert Curve.of(curve.entries()).choices == [0, 3]
    for policy in (Ema(curve, [1, 2, 3, 4], [0.9] * 3), Table.measured(curve, [1, 2, 3, 4], [0.9] * 3)):
        chosen = set()
        for _ in range(3000):
            chosen.add(levels := policy.plan(1))
            policy.learn(Outcome(levels, levels + 1, [levels], [True]))
            policy.took(1.0 if levels in (0, 3) else 0.1)
        assert chosen == {0, 3}


@pytest.mark.parametrize("backend", [Tape, Interpreted])
def test_many_rows_that_end_at_once_while_plain_rounds_are_held(backend, monkeypatch):
    """What rounds hold for the drafter knows fewer rows than the batch has: those behind them hold no sequence."""
    monkeypatch.setattr(cpu_linear, "pack", lambda weight: None)
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), Chain(2), graphs=backend(), adaptive=Fixed(0))
    engine.reserve(8, 60)
    limits = [6, 6, 30, 5, 5, 5, 5, 5]
    rows = [engine.add([1 + i, 2], max_new_tokens=n, eos=frozenset()) for i, n in enumerate(limits)]
    finish(engine)
    assert [len(row.tokens) for row in rows] == limits


def test_only_what_is_played_is_recorded(monkeypatch):
    """After a full batch a single row, of another kind; and texts that obey nothing but a temperature of their own,
    one row at a time."""
    monkeypatch.setattr(cpu_linear, "pack", lambda weight: None)
    engine = Engine(tiny_target(), graphs=Interpreted())
    engine.reserve(4, 60)
    for i in range(4):
        engine.add([1 + i], max_new_tokens=5)
    finish(engine)
    assert all(s.finish == "vacant" for s in engine.loop.batch.sequences)
    engine.add([3, 4], max_new_tokens=5, logprobs=True)
    finish(engine)
    assert [(key[1][0], key[1][3]) for key in engine.graphs.batch.graphs] == [(4, False), (1, True)]
    engine.reserve(1, 60)
    for temperature in (0.3, 0.6, 0.9):
        engine.add([3, 4], max_new_tokens=5, sampling=Sampling(temperature))
        finish(engine)
    assert len(engine.graphs.batch.graphs) == 1


def test_the_step_that_records_says_so():
    """Also where rounds are read late."""
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), Chain(2), graphs=(tape := Tape()), adaptive=Depths(2))
    engine.reserve(1, 60)
    engine.add([1, 2, 3], max_new_tokens=30, eos=frozenset())
    told, known = [], 0
    while (report := engine.step()) is not None:
        told.append((report.captured, tape.captures > known))
        known = tape.captures
    assert [said for said, _ in told] == [true for _, true in told]
    assert sum(said for said, _ in told) == 3


def test_costs_of_rounds_that_are_padded():
    """Three rows play the round of four, and what it takes is learnt of that."""
    rest = {1: [1.0, 2.0], 2: [1.0, 2.0], 4: [3.0, 4.0], 8: [5.0, 6.0]}
    curve = Curve([*rest], rest, {b: {1: 0.0, 2: 0.0} for b in rest}, padded=True)
    assert Curve.of(curve.entries()).padded
    assert [curve.plain(rows) for rows in (1, 2, 3, 5, 8, 9)] == [1.0, 1.0, 3.0, 5.0, 5.0, 5.0]
    curve.took(3, 0, 1, 3.5)
    assert (set(curve.excess), curve.excess[4][0]) == ({4}, 0.5)
    curve.forget(4, 0)
    assert curve.served[4][0] == 0


def test_rounds_are_prepared_and_timed_in_any_room_for_a_few_of_them(tmp_path, monkeypatch):
    """A chain of 16 levels in a room of 128 tokens: not all eight rounds fit that are timed elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_linear, "pack", lambda weight: None)
    target = tiny_target()
    drafter = tiny_drafter(target)
    engine = Engine(target, drafter, Chain(16), graphs=Interpreted())
    prepare(engine, Crowd(1, 128))
    assert len(engine.graphs.backend.made) == 1
    engine = adaptive_engine("ema", Crowd(1, 128), target, drafter, Chain(16), graphs=Interpreted())
    assert engine.adaptive.curve.choices == [0, 16]
    with pytest.raises(ValueError, match="a text may have 14 tokens, and to record and time rounds takes 15"):
        adaptive_engine("ema", Crowd(2, 14), target, drafter, Chain(3), graphs=Tape())


@pytest.mark.parametrize("backend", [Tape, Interpreted])
def test_generate_measures_the_rounds_that_it_plays(backend, tmp_path, monkeypatch):
    """Recorded ones of all rows, which the generation replays: nothing is measured eagerly or recorded twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_linear, "pack", lambda weight: None)
    monkeypatch.setattr("specdec.calibrate.measure_curve", None)
    monkeypatch.setattr("specdec.api.decode_row", lambda tokenizer, tokens, stops: "")
    target, curves = tiny_target(), []
    how = {"max_new_tokens": [30, 9, 20]}
    prompts = [[3, 5, 7], [1], [2, 4]]
    make = calibrate.make_policy
    monkeypatch.setattr("specdec.calibrate.make_policy", lambda *g, **h: curves.append(make(*g, **h)) or curves[0])
    graphs = backend()
    found = generate(target, prompts, tiny_drafter(target), tree="1/3/4", adaptive="ema", graphs=graphs, **how)
    assert [row.tokens for row in found.rows] == [row.tokens for row in generate(target, prompts, **how).rows]
    assert curves[0].curve.rows == [3]
    assert curves[0].curve.choices == ([0, 1, 2, 3] if backend is Tape else [0, 3])
    made = graphs.captures if backend is Tape else len(graphs.made)
    assert made == len(curves[0].curve.choices)
