"""Rounds as graphs, as they are before they are compiled: torch runs the operators of the graph one by one."""

from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_target
from tape import Interpreted, Tape
from test_graphs import SHORT, parts
from test_overlap import outcome

from specdec.drafters import ngram
from specdec.engine import graphs
from specdec.engine.compiled import build, rewrite
from specdec.engine.compiled.backend import compiled_run
from specdec.engine.engine import Engine
from specdec.model import cpu_linear
from specdec.model.target import Target
from specdec.trees import Chain


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    """Weights that are not packed: packed ones become inputs of a graph with the operators of `native.cpp` only."""
    monkeypatch.setattr(cpu_linear, "pack", lambda weight: None)


def interpreting(*what) -> Engine:
    return Engine(*what, graphs=Interpreted())


def graphs_of(engine: Engine) -> list:
    return engine.graphs.backend.made


def test_what_a_round_made_is_new_each_time():
    """An observer may keep it, and is told at once: nothing is read late."""
    target, drafter, policy = parts()
    compiled, kept = interpreting(target, drafter, policy), []
    assert not compiled.overlap
    compiled.generate(SHORT["prompts"], max_new_tokens=12, observer=lambda r: kept.append((r.tree, r.logits)))
    trees = [tree for tree, _ in kept if tree is not None]
    assert len({tree.tokens.data_ptr() for tree in trees}) == len(trees) > 2


def test_rows_are_written_into_the_memory_itself():
    """No `index_copy_` is left, and views of a cache are read only."""
    target, drafter, policy = parts()
    compiled = interpreting(target, drafter, policy)
    outcome(compiled, **SHORT)
    (graph,) = graphs_of(compiled)
    written = [node.args[0] for node in graph.module.graph.nodes if node.target is torch.ops.aten.index_put_.default]
    # Keys and values of three layers; the accepted nodes of these; four levels of the drafter's only layer.
    assert len(written) == 2 * 3 + 3 + 2 * policy.steps
    assert all(node.op == "placeholder" for node in written)
    assert not [n for n in graph.module.graph.nodes if n.target is torch.ops.aten.index_copy_.default]


@pytest.mark.parametrize("keepdim", [True, False])
def test_the_largest_and_its_place(keepdim):
    """Also the first of equals, and with numbers that are none a place that exists."""
    x = torch.randn(3, 4, rewrite.MANY)
    x[0, 0, 7] = x[0, 0, 500] = 9
    x[1] = -torch.inf
    run = compiled_run(lambda _: x.max(-1, keepdim), [], [8, 4], Interpreted().compile)
    value, place = run(8)
    assert torch.equal(value, x.max(-1, keepdim).values)
    assert torch.equal(place, x.max(-1, keepdim).indices)
    x[0, 1] = torch.nan
    assert 0 <= run(8)[1].flatten()[1] < rewrite.MANY


def run_of(function, bounds=(8, 4)):
    return compiled_run(function, [], list(bounds), Interpreted().compile)


def test_a_bound_makes_lines():
    """Numbers that grow with the bound, also several times as fast, and lists of numbers."""
    x = torch.arange(100)

    def function(bound: int):
        return x[bound : 2 * bound + 1].view(1, bound + 1).expand(3, bound + 1).sum(0)

    run = run_of(function)
    for bound in range(2, 9):
        assert torch.equal(run(bound), function(bound))


def test_what_is_no_graph_is_refused():
    x, generator = torch.arange(100.0), torch.Generator()
    with pytest.raises(ValueError, match=r"whose operators depend on the length of the texts"):
        run_of(lambda bound: x + 1 if bound == 8 else x * 2)
    with pytest.raises(ValueError, match=r"in which 4\.0 becomes 8\.0 for longer texts"):
        run_of(lambda bound: x * float(bound))
    with pytest.raises(ValueError, match=r"draws by aten\.multinomial"):
        run_of(lambda bound: x.multinomial(1, generator=generator))


def test_recording_leaves_no_trace():
    kept = torch.tensor([1, 2])

    def function(bound: int):
        kept.add_(1)
        return kept * bound

    run = compiled_run(function, [kept], [8, 4], Interpreted().compile)
    assert kept.tolist() == [1, 2]
    assert run(3).tolist() == [6, 9]
    assert kept.tolist() == [2, 3]


def test_libraries_are_told_apart(monkeypatch):
    """By what they compute, the shapes, and the number of threads; not by what weights hold."""

    def key(layers=1, rows=1, threads=1, seed=0) -> str:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        engine = interpreting(tiny_target(layers=layers, seed=seed))
        engine.generate([[3]] * rows, max_new_tokens=2)
        return build.key_of(graphs_of(engine)[0])

    assert key() == key(seed=1)
    assert len({key(), key(layers=2), key(rows=2), key(threads=2)}) == 4


def test_rooms_are_few():
    """Each room needs a graph of its own."""
    target = tiny_target(context=10_000)
    backend = SimpleNamespace(any_bound=True, forget=lambda: None)
    kept = graphs.Graphs(SimpleNamespace(target=target), backend)
    assert [kept.room_for([1], room) for room in (1, 1024, 1025, 4096, 5000)] == [1024, 1024, 4096, 4096, 10_000]


def test_what_cannot_be_compiled_is_said(monkeypatch):
    target = tiny_target()
    with pytest.raises(ValueError, match=r"NGram cannot be captured: .* decode without compiling"):
        Engine(target, ngram.create(target), Chain(3), compile=True)
    with pytest.raises(ValueError, match=r"contradicts compile=True on the cpu"):
        Engine(target, graphs=Tape(), compile=True)
    monkeypatch.setattr(Target, "device", torch.device("mps"))
    with pytest.raises(ValueError, match=r"for CPUs and NVIDIA's GPUs, and the target is on the mps"):
        Engine(target, compile=True)
    monkeypatch.setattr(Target, "device", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"call specdec\.kernels\.use\('torch'\) before"):
        Engine(target, compile=True)
