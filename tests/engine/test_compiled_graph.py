"""Rounds as graphs, as they are before they are compiled: torch runs the operators of the graph one by one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_drafter, tiny_target
from tape import Tape
from test_graphs import CAPTURABLE, POLICIES, SHORT, launching, parts
from test_overlap import SAMPLED, assert_same, outcome

from specdec.drafters import ngram
from specdec.engine import graphs
from specdec.engine.compiled import build, rewrite
from specdec.engine.compiled.backend import CompiledRounds, compiled_run
from specdec.engine.engine import Engine
from specdec.engine.recorder import Recorder
from specdec.engine.trace_files import read_trace, write_trace
from specdec.model import cpu_linear
from specdec.model.target import Target
from specdec.structs import Sampling
from specdec.trees import Chain, SampledTree
from specdec.verify import VERIFIERS, make_verifier


class Interpreted(CompiledRounds):
    """Graphs that torch runs."""

    def __init__(self):
        self.made, self.workshop = [], None

    def compile(self, graph):
        self.made.append(graph)
        return lambda inputs: list(graph.module(*inputs))


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    """Weights that are not packed: packed ones become inputs of a graph with the operators of `native.cpp` only."""
    monkeypatch.setattr(cpu_linear, "pack", lambda weight: None)


def interpreting(*what) -> Engine:
    return Engine(*what, graphs=Interpreted())


def graphs_of(engine: Engine) -> list:
    return engine.graphs.backend.made


@pytest.mark.parametrize("drafter", CAPTURABLE)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_does_what_the_round_does(policy, drafter):
    """Greedy on a tree of each kind, sampled on the two whose rounds draw more. The graph computes what is drawn."""
    target, drafter, policy = parts(drafter, policy)
    how = SHORT | {"sampling": SAMPLED if policy.samples or policy.topk == 1 else Sampling()}
    compiled = interpreting(target, drafter, policy)
    assert_same(outcome(compiled, **how), outcome(launching(target, drafter, policy), **how))
    (graph,) = graphs_of(compiled)
    assert not any("rand" in str(node.target) or "exponential" in str(node.target) for node in graph.module.graph.nodes)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_rule(verifier):
    target, rule = tiny_target(), make_verifier(verifier)
    policy = SampledTree((1, 1) if rule.chains_only else (2, 2))
    parts_ = target, tiny_drafter(target, draft_vocab=8), policy, rule
    assert_same(*(outcome(make(*parts_), sampling=SAMPLED, **SHORT) for make in (interpreting, launching)))


@pytest.mark.parametrize("rows", [1, 2])
def test_plain_decoding_with_penalties(rows):
    sampling = Sampling(0.5, repetition_penalty=1.5, frequency_penalty=0.5)
    how = {"prompts": [[3, 5, 7], [1]][:rows], "max_new_tokens": 12, "sampling": sampling, "logprobs": True}
    target = tiny_target()
    assert_same(outcome(interpreting(target), **how), outcome(launching(target), **how))


@pytest.mark.parametrize("window", [4, 200])
def test_one_graph_serves_all_lengths(window):
    """Of a target whose layers are of two kinds, one of which sees few positions only, or more than half of those that
    there is room for: then a round of half of them has no mask."""
    plain = tiny_target()
    target = Target(replace(plain.config, sliding=(True, False, True), window=window)).eval()
    target.load_state_dict(plain.state_dict())
    parts_ = target, tiny_drafter(target), POLICIES["dynamic"]
    compiled = interpreting(*parts_)
    for length, new in ((1, 90), (100, 60), (200, 30)):
        how = {"prompts": [[3, 5] * 100][:1], "max_new_tokens": new, "eos": frozenset()}
        how["prompts"][0] = how["prompts"][0][:length]
        assert_same(outcome(compiled, **how), outcome(launching(*parts_), **how))
    (graph,) = graphs_of(compiled)
    assert len(graph.inputs[0]) == compiled.graphs.batch.room == target.config.context


def test_sequences_that_come_and_go():
    target, drafter, policy = parts()
    told = []
    for engine in (interpreting(target, drafter, policy), launching(target, drafter, policy)):
        engine.reserve(2, 64)
        rows = [engine.add(prompt, max_new_tokens=9) for prompt in ([3, 5, 7], [1], [4, 4, 9, 8])]
        while engine.step() is not None:
            pass
        told.append([row.tokens for row in rows])
    assert told[0] == told[1]


def test_what_a_round_made_is_new_each_time():
    """An observer may keep it, and is told at once: nothing is read late."""
    target, drafter, policy = parts()
    compiled, kept = interpreting(target, drafter, policy), []
    assert not compiled.overlap
    compiled.generate(SHORT["prompts"], max_new_tokens=12, observer=lambda r: kept.append((r.tree, r.logits)))
    trees = [tree for tree, _ in kept if tree is not None]
    assert len({tree.tokens.data_ptr() for tree in trees}) == len(trees) > 2


def test_a_compiled_run_is_traced(tmp_path):
    """With the time of its rounds, that of compiling apart."""
    target, drafter, policy = parts()
    recorder = Recorder()
    result = interpreting(target, drafter, policy).generate([[3, 5, 7]], max_new_tokens=12, observer=recorder)
    write_trace(recorder.trace, tmp_path / "trace")
    (row,) = read_trace(tmp_path / "trace").rows
    assert [token for r in row.rounds for token in r.emitted] == result.rows[0].tokens[1:]
    assert {part for r in row.rounds for part in r.seconds} == {"round", "host"}
    assert result.parts["capture"] > 0
    assert result.parts["round"] < result.decode_seconds < result.seconds - result.parts["capture"]


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
