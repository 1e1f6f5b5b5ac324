"""Rounds that Inductor compiles, in this process and in another one."""

import pickle

import pytest
import torch
from helpers import assert_as_alone, tiny_drafter, tiny_target
from policies import Depths
from tape import Interpreted
from test_graphs import SHORT, parts
from test_overlap import SAMPLED

from specdec.cli.commands import parse
from specdec.engine.compiled import build
from specdec.engine.compiled.backend import compiled_run
from specdec.engine.engine import Engine
from specdec.ops import linear as cpu_linear
from specdec.ops import native
from specdec.structs import Sampling
from specdec.trees import Chain

try:
    COMPILER = native.compiler()
except ValueError:
    COMPILER = None
HOW = {"prompts": [[3, 5, 7]], "max_new_tokens": 20, "eos": frozenset()}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def test_compiled_rounds_are_replayed_so_graphs_cannot_be_off():
    for name, words in (("generate", ["--prompt", "x"]), ("serve", [])):
        with pytest.raises(ValueError, match="--no-graphs contradicts --compile"):
            parse(name, [*words, "--compile", "--no-graphs"])
    with pytest.raises(ValueError, match="graphs=False contradicts compile=True"):
        Engine(tiny_target(), graphs=False, compile=True)


@needs_compiler
@pytest.mark.matrix
@pytest.mark.parametrize("how", [True, "aside"], ids=["here", "aside"])
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "pair"])
def test_a_compiled_round(drafts, how, tmp_path, monkeypatch, capfd):
    """The text is that of an eager round. The next engine loads the cached library; a damaged one is removed.
    Rounds are eager while another process compiles."""
    monkeypatch.setattr(build, "kept_folder", lambda name: tmp_path)
    target = tiny_target(layers=1)
    models = [target, tiny_drafter(target)] if drafts else [target]
    for parameter in (p for model in models for p in model.parameters()):  # as bf16 holds them, for FBGEMM
        parameter.requires_grad_(False).copy_(parameter.bfloat16())
    parts = (*models, Chain(1)) if drafts else models
    expected = Engine(*parts).generate(**HOW).rows[0]
    engine = Engine(*parts, compile=how)
    result = engine.generate(**HOW)
    assert (result.rows[0].tokens, result.rows[0].trace) == (expected.tokens, expected.trace)
    if how == "aside":
        (graph,) = engine.graphs.batch.graphs.values()
        assert graph.eager
        assert not list(tmp_path.glob("*/round.so"))
        engine.graphs.finish()
        assert engine.generate(**HOW).rows[0].tokens == expected.tokens
        assert not graph.eager
    else:
        assert result.decode_seconds < result.parts["capture"] < result.seconds
    said = capfd.readouterr().err
    assert ("compiling a round ... " in said) == (how is True)
    assert "is cached" in said

    (library,) = tmp_path.glob("*/round.so")
    assert {path.name for path in library.parent.iterdir()} <= {"round.so", "round.json"}
    monkeypatch.setattr(build, "make_library", None)
    for again in (Engine(*parts, compile=True), Engine(*parts, compile="aside")):
        assert again.generate(**HOW).rows[0].tokens == expected.tokens
        assert not any(graph.eager for graph in again.graphs.batch.graphs.values())
    assert "loaded a compiled round" in capfd.readouterr().err
    damaged = tmp_path / "damaged" / "round.so"
    damaged.parent.mkdir()
    damaged.write_bytes(b"no library")
    assert build.load_if_present(damaged) is None
    assert not damaged.parent.exists()


@needs_compiler
def test_what_does_not_compile_stays_eager(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(build, "kept_folder", lambda name: tmp_path)
    target = tiny_target(layers=1)
    engine, expected = Engine(target, compile="aside"), Engine(target).generate(**HOW).rows[0].tokens
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(2):
        assert engine.generate(**HOW).rows[0].tokens == expected
        engine.graphs.finish()
    said = capfd.readouterr().err
    assert "a round stays eager, as it was not compiled" in said
    assert "no-such-compiler" in said
    assert "Traceback" not in said
    assert [graph.eager for graph in engine.graphs.batch.graphs.values()] == [True]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "int8"), [(True, False), (True, True), (False, False), (False, True)])
@torch.inference_mode()
def test_products_with_packed_weights(dtype, rows, int8, monkeypatch):
    """A graph gives the same numbers to the last bit, from weights that are handles or packed tensors."""
    native.load()
    rows, graphs = native.has_rows() and rows, []
    monkeypatch.setattr(native, "has_rows", lambda: rows)
    monkeypatch.setattr(cpu_linear, "LARGE", 0)
    with torch.inference_mode(False), torch.no_grad():
        weight, bias = (torch.randn(size).bfloat16().to(dtype) for size in ((24, 16), (24,)))
        products = cpu_linear.linear(weight, None, int8), cpu_linear.linear(weight, bias, int8)
    x = torch.randn(3, 16).to(dtype)
    expected = torch.stack([product(x) for product in products])

    def interpret(graph):
        graphs.append(graph)
        return lambda inputs: list(graph.module(*inputs))

    run = compiled_run(lambda _: torch.stack([product(x) for product in products]), [], [8, 4], interpret)
    assert torch.equal(run(8), expected)
    used = {str(node.target).split(".")[0] for node in graphs[0].module.graph.nodes if node.op == "call_function"}
    assert used & {"quantized", "mkldnn"} == set()


@needs_compiler
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "draft-model", "dspark"])
def test_a_graph_that_is_written_down_is_the_same_graph(drafter, sampling, tmp_path):
    """The other process compiles what this one looks for, without any tensor. Each library is ordered once."""
    native.load()
    engine = Engine(*parts(drafter), graphs=Interpreted())
    engine.generate(**SHORT, sampling=sampling)
    for graph in engine.graphs.backend.made:
        text = pickle.dumps(build.written(graph))
        again = build.read(*pickle.loads(text))
        assert build.key_of(again) == build.key_of(graph)
        assert not any(isinstance(x, torch.Tensor) for x in again.inputs)
        assert len(text) < 200_000
    workshop = build.Workshop()
    order = workshop.order_of(graph, tmp_path)
    assert workshop.order_of(graph, tmp_path) is order is not workshop.order_of(graph, tmp_path / "other")
    workshop.forget()
    assert workshop.orders == []


class Slow(Interpreted):
    """Each graph is ready from its third round on."""

    def capture(self, run, preserved, bound):
        replay, rounds = super().capture(run, preserved, bound), []

        def play(bound):
            rounds.append(bound)
            if len(rounds) > 3:
                return replay(bound)
            output = run(bound)
            output.eager = True
            return output

        return play


def test_a_policy_learns_when_rounds_take_another_time():
    """The policy hears it once for each number of rows and levels. Reports say which rounds were recorded."""
    target, drafter, tree = parts("eagle3", "chain")
    policy, reported, captured = Depths(3), [], 0
    policy.changed = lambda *what: reported.append(what)
    engine = Engine(target, drafter, tree, graphs=Slow(), adaptive=policy)
    engine.reserve(2, 100)
    rows = [engine.add(p, max_new_tokens=n, eos=frozenset()) for p, n in (([3, 5, 7], 90), ([1], 40))]
    while (report := engine.step()) is not None:
        captured += report.captured
    assert sorted(reported) == [(rows, levels) for rows in (1, 2) for levels in range(4)]
    assert captured == len(engine.graphs.batch.graphs) == len(engine.graphs.backend.made) == 8
    assert_as_alone(target, rows)
