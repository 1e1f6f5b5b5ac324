"""Graphs of rounds before they are compiled: torch runs their operators one by one."""

from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_target
from tape import Interpreted, Tape
from test_graphs import SHORT, parts

from specdec.drafters import ngram
from specdec.engine import graphs
from specdec.engine.compiled import build
from specdec.engine.compiled.backend import compiled_run
from specdec.engine.engine import Engine
from specdec.model.target import Target
from specdec.ops.likely import LOOPS
from specdec.trees import Chain


def test_rows_are_written_into_the_memory_itself(unpacked):
    """No `index_copy_` is left, and views of a cache are read only. What a round returns is new each time."""
    (target, drafter, policy), saved = parts(), []
    compiled = Engine(target, drafter, policy, graphs=Interpreted())
    assert not compiled.overlap
    compiled.generate(**SHORT, observer=lambda report: saved.append(report.tree))
    places = {tree.tokens.data_ptr() for tree in saved[1:]}
    assert len(places) == len(saved) - 1 > 2
    (graph,) = compiled.graphs.backend.made
    written = [node.args[0] for node in graph.module.graph.nodes if node.target is torch.ops.aten.index_put_.default]
    # Keys and values of three layers; the accepted nodes of these; four levels of the drafter's only layer.
    assert len(written) == 2 * 3 + 3 + 2 * policy.steps
    assert all(node.op == "placeholder" for node in written)
    assert not [n for n in graph.module.graph.nodes if n.target is torch.ops.aten.index_copy_.default]


def run_of(function, saved=()):
    return compiled_run(function, [*saved], [8, 4], Interpreted().compile)


@pytest.mark.parametrize("keepdim", [True, False])
def test_the_largest_and_its_place(keepdim):
    """The first of equal numbers counts. With nan among them the place is one that exists."""
    x = torch.randn(3, 4, LOOPS)
    x[0, 0, 7] = x[0, 0, 500] = 9
    x[1] = -torch.inf
    run = run_of(lambda _: x.max(-1, keepdim))
    value, place = run(8)
    assert torch.equal(value, x.max(-1, keepdim).values)
    assert torch.equal(place, x.max(-1, keepdim).indices)
    x[0, 1] = torch.nan
    assert 0 <= run(8)[1].flatten()[1] < LOOPS


def test_graphs_of_any_bound():
    """Numbers may grow with the bound, also several times as fast. Recording does not change the preserved tensors."""
    x, saved = torch.arange(100), torch.tensor([1, 2])

    def function(bound: int) -> torch.Tensor:
        saved.add_(1)
        return x[bound : 2 * bound + 1].view(1, bound + 1).expand(3, bound + 1).sum(0) + saved[0] * bound

    run = run_of(function, [saved])
    assert saved.tolist() == [1, 2]
    for bound in range(2, 9):
        assert torch.equal(run(bound), 3 * x[bound : 2 * bound + 1] + bound * bound)
    assert saved.tolist() == [8, 9]


def test_what_is_no_graph_is_refused():
    x, generator = torch.arange(100.0), torch.Generator()
    with pytest.raises(ValueError, match=r"whose operators depend on the length of the texts"):
        run_of(lambda bound: x + 1 if bound == 8 else x * 2)
    with pytest.raises(ValueError, match=r"in which 4\.0 becomes 8\.0 for longer texts"):
        run_of(lambda bound: x * float(bound))
    with pytest.raises(ValueError, match=r"draws by aten\.multinomial"):
        run_of(lambda bound: x.multinomial(1, generator=generator))


def test_libraries_differ_by_what_they_compute(monkeypatch, unpacked):
    """The shapes and the number of threads count; the values of weights do not. Each room needs a graph."""

    def key(layers=1, rows=1, threads=1, seed=0) -> str:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        engine = Engine(tiny_target(layers=layers, seed=seed), graphs=Interpreted())
        engine.generate([[3]] * rows, max_new_tokens=2)
        return build.key_of(engine.graphs.backend.made[0])

    assert key() == key(seed=1)
    assert len({key(), key(layers=2), key(rows=2), key(threads=2)}) == 4
    backend = SimpleNamespace(any_bound=True, forget=lambda: None)
    saved = graphs.Graphs(SimpleNamespace(target=tiny_target(context=10_000)), backend)
    assert [saved.room_for([1], room) for room in (1, 1024, 1025, 5000)] == [1024, 1024, 4096, 10_000]


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
    with pytest.raises(ValueError, match=r"call specdec\.ops\.use\('torch'\) before"):
        Engine(target, compile=True)
