"""Rounds that Inductor compiles, in this process and in another one, and their graphs before: torch runs these."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_as_alone, finish, tiny_drafter, tiny_target
from policies import Depths
from tape import Interpreted, Tape
from test_graphs import SHORT, parts
from test_overlap import SAMPLED
from torch import Tensor

from specdec import Engine, Sampling
from specdec.cli.commands import parse
from specdec.drafters import ngram
from specdec.engine import graphs
from specdec.engine.compiled import build
from specdec.engine.compiled.graph import record
from specdec.engine.compiled.rounds import recorded_graph, replay_of
from specdec.model.target import Target
from specdec.ops import linear as cpu_linear
from specdec.ops import native
from specdec.ops.likely import LOOPS
from specdec.trees import Chain

try:
    COMPILER = native.compiler()
except ValueError:
    COMPILER = None
HOW = {"prompts": [[3, 5, 7]], "max_new_tokens": 20, "eos": frozenset()}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy, Tensor.item, bool], ids=lambda read: read.__name__)
def test_a_round_that_reads_values_on_the_host_is_not_compiled(read):
    """Such as one of a user's tree. The graph would repeat in every round what the host has read in the first."""
    with pytest.raises(ValueError, match="a compiled round cannot read values of tensors on the host"):
        record(lambda bound: read(torch.ones(1) + bound), 8)


def compiled_run(run, preserved, bounds, compile):
    graph = recorded_graph(run, preserved, bounds)
    return replay_of(graph, compile(graph))


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
@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "draft-model", "dspark", "lookup"])
def test_a_graph_that_is_written_down_is_the_same_graph(drafter, sampling, tmp_path):
    """The other process compiles what this one looks for, without any tensor. Each library is ordered once."""
    native.load()
    engine = Engine(*parts(drafter), graphs=Interpreted())
    engine.generate(**SHORT, sampling=sampling)
    for graph in engine.graphs.executor.made:
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


def test_a_policy_learns_when_rounds_take_another_time(unpacked):
    """The policy hears it once for each number of rows and levels. Reports say which rounds were recorded."""
    target, drafter, tree = parts("eagle3", "chain")
    policy, reported = Depths(3), []
    policy.changed = lambda *what: reported.append(what)
    engine = Engine(target, drafter, tree, graphs=Slow(), adaptive=policy)
    engine.reserve(2, 100)
    rows = [engine.add(p, max_new_tokens=n, eos=frozenset()) for p, n in (([3, 5, 7], 90), ([1], 40))]
    captured = sum(report.captured for report in finish(engine))
    assert sorted(reported) == [(rows, levels) for rows in (1, 2) for levels in range(4)]
    assert captured == len(engine.graphs.batch.graphs) == len(engine.graphs.executor.made) == 8
    assert_as_alone(target, rows)
    reported.clear()
    Engine(target, drafter, tree, graphs=Interpreted(), adaptive=policy).generate(**HOW)
    assert not reported, "a round that was never eager takes no other time"


def test_rows_are_written_into_the_memory_itself(unpacked):
    """No `index_copy_` is left, and views of a cache are read only. What a round returns is new each time."""
    (target, drafter, policy), saved = parts(), []
    compiled = Engine(target, drafter, policy, graphs=Interpreted())
    assert not compiled.overlap
    compiled.generate(**SHORT, observer=lambda report: saved.append(report.tree))
    assert len({tree.tokens.data_ptr() for tree in saved[1:]}) == len(saved) - 1 > 2
    (graph,) = compiled.graphs.executor.made
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
    with pytest.raises(ValueError, match=r"in which 4 becomes 6 for longer texts"):  # equal at the last bound
        compiled_run(lambda bound: x[: min(bound, 6)] + 1, [], [8, 4, 7], Interpreted().compile)
    with pytest.raises(ValueError, match=r"draws by aten\.multinomial"):
        run_of(lambda bound: x.multinomial(1, generator=generator))


def test_libraries_differ_by_what_they_compute(monkeypatch, unpacked):
    """The shapes and the number of threads count; the values of weights do not. Each room needs a graph."""

    def key(layers=1, rows=1, threads=1, seed=0) -> str:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        engine = Engine(tiny_target(layers=layers, seed=seed), graphs=Interpreted())
        engine.generate([[3]] * rows, max_new_tokens=2)
        return build.key_of(engine.graphs.executor.made[0])

    assert key() == key(seed=1)
    assert len({key(), key(layers=2), key(rows=2), key(threads=2)}) == 4
    backend = SimpleNamespace(any_bound=True, forget=lambda: None)
    saved = graphs.Graphs(SimpleNamespace(target=tiny_target(context=10_000)), backend)
    assert [saved.room_for([1], room) for room in (1, 1024, 1025, 5000)] == [1024, 1024, 4096, 10_000]


def test_what_cannot_be_compiled_is_said(monkeypatch):
    """Compiled rounds are replayed, so graphs cannot be off."""
    target = tiny_target()
    for name, words in (("generate", ["--prompt", "x"]), ("serve", [])):
        with pytest.raises(ValueError, match="--no-graphs contradicts --compile"):
            parse(name, [*words, "--compile", "--no-graphs"])
    monkeypatch.setattr(ngram.NGram, "capturable", False)
    for device, parts_, graphs_, message in (
        ("cpu", (), False, "graphs=False contradicts compile=True"),
        ("cpu", (ngram.create(target), Chain(3)), None, "NGram cannot be captured: .* decode without compiling"),
        ("cpu", (), Tape(), "contradicts compile=True on the cpu"),
        ("mps", (), None, "for CPUs and NVIDIA's GPUs, and the target is on the mps"),
        ("cuda", (), None, r"call specdec\.ops\.use\('torch'\) before"),
    ):
        monkeypatch.setattr(Target, "device", torch.device(device))
        with pytest.raises(ValueError, match=message):
            Engine(target, *parts_, graphs=graphs_, compile=True)
