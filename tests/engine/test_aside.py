"""Rounds that are compiled in another process: launched until their function is there, with the same text."""

import pickle

import pytest
import torch
from helpers import tiny_target
from policies import Depths
from tape import Interpreted
from test_compile import COMPILER, HOW, pair
from test_graphs import SHORT, parts
from test_overlap import SAMPLED

from specdec.engine.compiled import aside, build
from specdec.engine.engine import Engine
from specdec.model import native
from specdec.structs import Sampling

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "draft-model", "dspark"])
def test_a_graph_that_is_written_down_is_the_same_graph(drafter, sampling):
    """Operators, numbers and shapes, packed weights among them: what the other process compiles is what is looked for
    here. It holds no tensor."""
    native.load()
    engine = Engine(*parts(drafter), graphs=Interpreted())
    engine.generate(**SHORT, sampling=sampling)
    for graph in engine.graphs.backend.made:
        text = pickle.dumps(aside.written(graph))
        again = aside.read(*pickle.loads(text))
        assert build.key_of(again) == build.key_of(graph)
        assert not any(isinstance(x, torch.Tensor) for x in again.inputs)
        assert len(text) < 200_000


@needs_compiler
def test_rounds_are_launched_until_they_are_compiled(tmp_path, monkeypatch, capfd):
    """Nobody waits. The next engine finds what was made."""
    monkeypatch.setattr(build, "kept_folder", lambda name: tmp_path)
    target, _, _ = pair()
    expected = Engine(target).generate(**HOW).rows[0].tokens
    engine = Engine(target, compile="aside")
    assert engine.generate(**HOW).rows[0].tokens == expected
    (graph,) = engine.graphs.batch.graphs.values()
    assert graph.launched
    assert not list(tmp_path.glob("*/round.so"))
    engine.graphs.backend.workshop.finish()
    assert len(list(tmp_path.glob("*/round.so"))) == 1
    assert engine.generate(**HOW).rows[0].tokens == expected
    assert not graph.launched
    assert "kept for the next time" in capfd.readouterr().err

    again = Engine(target, compile="aside")
    assert again.generate(**HOW).rows[0].tokens == expected
    (graph,) = again.graphs.batch.graphs.values()
    assert not graph.launched
    assert again.graphs.backend.workshop.orders == []


@needs_compiler
def test_what_does_not_compile_stays_launched(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(build, "kept_folder", lambda name: tmp_path)
    target = tiny_target(layers=1)
    engine = Engine(target, compile="aside")
    monkeypatch.setenv("CXX", "no-such-compiler")
    rows = engine.generate(**HOW).rows
    engine.graphs.backend.workshop.finish()
    assert engine.generate(**HOW).rows[0].tokens == rows[0].tokens == Engine(target).generate(**HOW).rows[0].tokens
    said = capfd.readouterr().err
    assert "a round stays launched, as it was not compiled" in said
    assert "no-such-compiler" in said
    assert "Traceback" not in said
    (graph,) = engine.graphs.batch.graphs.values()
    assert graph.launched


def test_a_library_is_made_once_and_an_order_holds_no_tensor(tmp_path):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    native.load()
    engine = Engine(*parts("eagle3"), graphs=Interpreted())
    engine.generate(**SHORT)
    (graph,), workshop = engine.graphs.backend.made, aside.Workshop()
    order = workshop.order_of(graph, tmp_path)
    assert workshop.order_of(graph, tmp_path) is order
    assert workshop.order_of(graph, tmp_path / "other") is not order
    assert not any(isinstance(x, torch.Tensor) for x in order.graph[1])
    workshop.forget()
    assert workshop.orders == []


class Slow(Interpreted):
    """Each graph is there from its third round on."""

    def capture(self, run, kept, bound):
        replay, rounds = super().capture(run, kept, bound), []

        def play(bound):
            rounds.append(bound)
            if len(rounds) > 3:
                return replay(bound)
            output = run(bound)
            output.launched = True
            return output

        return play


def test_a_policy_is_told_when_rounds_take_another_time():
    """Once for each number of rows and levels; and who waits is told which rounds were recorded."""
    target, drafter, tree = parts("eagle3", "chain")
    policy, told, captured = Depths(3), [], 0
    policy.changed = lambda *what: told.append(what)
    engine = Engine(target, drafter, tree, graphs=Slow(), adaptive=policy)
    engine.reserve(2, 100)
    rows = [engine.add(p, max_new_tokens=n, eos=frozenset()) for p, n in (([3, 5, 7], 90), ([1], 40))]
    while (report := engine.step()) is not None:
        captured += report.captured
    assert sorted(told) == [(rows, levels) for rows in (1, 2) for levels in range(4)]
    assert captured == len(engine.graphs.batch.graphs) == len(engine.graphs.backend.made) == 8
    plain = Engine(target)
    assert [row.tokens for row in rows] == [
        plain.generate([row.prompt], max_new_tokens=row.limit, eos=frozenset()).rows[0].tokens for row in rows
    ]
