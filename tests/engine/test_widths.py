"""Recorded rounds of several numbers of rows and levels; a tape replaces a CUDA graph."""

import json
from itertools import pairwise

import pytest
from helpers import DRAFTERS, MIXED, come_and_go, finish, job, tiny_drafter, tiny_target
from policies import Depths
from tape import Interpreted, Tape

from specdec import Engine, Sampling
from specdec.api import generate
from specdec.engine.adaptive import Fixed, Outcome
from specdec.engine.graphs import widths_up_to
from specdec.engine.report import Reads
from specdec.trees import Chain, DynamicTree
from specdec.tuning import engines
from specdec.tuning.costs import PLAIN, Costs, Kind, Point
from specdec.tuning.engines import Table, Workload, adaptive_engine, prepare
from specdec.tuning.policy import Bandit


@pytest.mark.parametrize(
    ("kind", "samplings", "adaptive"),
    [(None, MIXED, False), ("eagle3", (None,), False), ("draft-model", MIXED, False), ("eagle3", (None,), True),
     ("mtp-two-heads-pre-norm", (None,), True), ("medusa", (None,), True), ("draft-model", MIXED, True)],
)  # fmt: skip
def test_rounds_have_the_rows_that_decode(kind, samplings, adaptive):
    """Each round has the least width that holds its rows. Text and accepted tokens are those of eager rounds."""
    target, tape, traces = tiny_target(layers=2), Tape(), []
    parts = (DRAFTERS[kind](target), DynamicTree(3, 3, 9)) if kind else ()
    for how in ({"graphs": tape}, {"compact": False, "overlap": True}):
        policy = Depths(3)
        engine = Engine(target, *parts, **how, adaptive=policy if adaptive else None)
        sequences, _ = come_and_go(engine, [job(i, samplings) for i in range(9)], abort=6)
        traces.append([(s.trace.accepted, s.trace.emitted) for s in sequences if s.finish != "abort"])
        assert not adaptive or {outcome.levels for outcome in policy.outcomes} == {0, 1, 2, 3}
    assert traces[0] == traces[1]
    assert set(tape.rows) == {1, 2, 4, 5}
    assert any(b < a for a, b in pairwise(tape.rows))
    assert [widths_up_to(rows) for rows in (1, 3, 4, 8)] == [[1], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8]]


@pytest.mark.parametrize("padded", [False, True])
def test_costs_of_recorded_rounds(padded):
    """Only measured levels may be chosen. Rounds of three rows cost as much as those of four if they are padded."""
    kinds = [PLAIN, *(Kind(levels, levels + 1, levels - 1) for levels in (1, 2, 3))]
    costs = Costs((Point(kind, b, 128.0, 1.0 * b, 0.0) for kind in (PLAIN, kinds[3]) for b in (1, 2, 4)), padded)
    expected = [1.0, 4.0, 4.0] if padded else [1.0, 3.0, 5.0]
    assert [costs.seconds(PLAIN, rows) for rows in (1, 3, 5)] == pytest.approx(expected)
    for policy in (Bandit(costs, kinds, [0.9] * 3), Table.measured(costs, kinds, [0.9] * 3)):
        chosen = set()
        for _ in range(3000):
            chosen.add(levels := policy.plan(1))
            policy.learn(Outcome(levels, levels + 1, [levels], [True]))
            policy.took(1.0 if levels in (0, 3) else 0.1)
        assert chosen <= {0, 3}


def measured_engine(name: str, eos: frozenset[int] = frozenset(), **how) -> Engine:
    target = tiny_target(layers=1)
    target.eos = eos
    return adaptive_engine(name, Workload(5, 200), target, tiny_drafter(target), Chain(3), **how)


@pytest.mark.parametrize("name", ["ema", "table"])
def test_costs_are_measured_with_the_records_that_are_played_later(name, tmp_path, monkeypatch, unpacked):
    """Compiled rounds draft all levels or none. After measuring, nothing is recorded for greedy texts, whatever ends
    them. The next engine finds the costs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("specdec.tuning.timing.BUSY", 1e9)
    engine = measured_engine(name, frozenset({7}), graphs=Interpreted())
    assert engine.adaptive.name == name
    assert len(saved := list(tmp_path.rglob("*.json"))) == 1
    assert {tuple(point[0][:2]) for point in json.loads(saved[0].read_text())["points"]} == {(0, 1), (3, 4)}
    assert sorted({point[1] for point in json.loads(saved[0].read_text())["points"]}) == [1, 2, 4, 5]
    made, levels = engine.graphs.executor.made, set()
    assert len(made) == 8
    for eos in (None, frozenset(), frozenset({4})):
        engine.reserve(5, 200, reads=Reads.TOKENS)
        for i in range(4):
            engine.add([1 + i, 2], max_new_tokens=20 + 5 * i, eos=eos)
        levels |= {report.nodes - 1 for report in finish(engine)}
    assert levels <= {0, 3}
    assert len(made) == 8
    monkeypatch.setattr("specdec.tuning.engines.measure_engine", None)
    measured_engine(name, frozenset({7}), graphs=Interpreted())


def test_measured_policies_and_recorded_rounds(tmp_path, monkeypatch, unpacked):
    """Captured rounds may draft any number of levels. Measuring needs a little room."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = measured_engine("ema", graphs=Tape())
    assert engine.adaptive.costs.choices == [0, 1, 2, 3]
    come_and_go(engine, [job(i, (None,)) for i in range(3)])
    assert measured_engine("survival").graphs is None
    with pytest.raises(ValueError, match="'survival' leaves out nodes"):
        measured_engine("survival", graphs=Tape())
    target = tiny_target(layers=1)
    parts = target, tiny_drafter(target)
    engine = Engine(*parts, Chain(16), graphs=Interpreted())
    prepare(engine, Workload(1, 128))
    assert len(engine.graphs.executor.made) == 1
    engine = adaptive_engine("ema", Workload(1, 128), *parts, Chain(16), graphs=Interpreted())
    assert engine.adaptive.costs.choices == [0, 16]
    with pytest.raises(ValueError, match="a text may have 14 tokens, and to record and time rounds takes 15"):
        adaptive_engine("ema", Workload(2, 14), *parts, Chain(3), graphs=Tape())


@pytest.mark.parametrize("backend", [Tape, Interpreted])
def test_many_rows_that_end_at_once_while_plain_rounds_are_held(backend, unpacked):
    """The batch has more rows than the positions that are held for the drafter know."""
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), Chain(2), graphs=backend(), adaptive=Fixed(0))
    engine.reserve(8, 60)
    limits = [6, 6, 30, 5, 5, 5, 5, 5]
    rows = [engine.add([1 + i, 2], max_new_tokens=n, eos=frozenset()) for i, n in enumerate(limits)]
    finish(engine)
    assert [len(row.tokens) for row in rows] == limits


def test_only_what_is_played_is_recorded(unpacked):
    """A full batch, then a single row of another kind, then rows of several temperatures."""
    engine = Engine(tiny_target(), graphs=Interpreted())
    engine.reserve(4, 60)
    for i in range(4):
        engine.add([1 + i], max_new_tokens=5)
    finish(engine)
    assert all(s.finish == "vacant" for s in engine.loop.batch.sequences)
    engine.add([3, 4], max_new_tokens=5, logprobs=True)
    finish(engine)
    assert [(key[1][0], key[1][4]) for key in engine.graphs.batch.graphs] == [(4, False), (1, True)]
    engine.reserve(1, 60)
    for temperature in (0.3, 0.6, 0.9):
        engine.add([3, 4], max_new_tokens=5, sampling=Sampling(temperature))
        finish(engine)
    assert len(engine.graphs.batch.graphs) == 1


def test_generate_measures_the_rounds_that_it_plays(tmp_path, monkeypatch, unpacked):
    """Nothing is measured eagerly or recorded twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("specdec.api.decode_row", lambda tokenizer, tokens, stops: "")
    target, found_costs = tiny_target(layers=1), []
    how = {"max_new_tokens": [30, 9, 20]}
    prompts = [[3, 5, 7], [1], [2, 4]]
    real = engines.engine_costs
    monkeypatch.setattr(engines, "engine_costs", lambda *given: found_costs.append(real(*given)) or found_costs[0])
    graphs = Interpreted()
    found = generate(target, prompts, tiny_drafter(target), tree="1/3/4", adaptive="ema", graphs=graphs, **how)
    assert [row.tokens for row in found.rows] == [row.tokens for row in generate(target, prompts, **how).rows]
    assert found_costs[0].rows == [3]
    assert found_costs[0].choices == [0, 3]
    assert graphs.captures == 2
