"""Rounds as recorded functions of static tensors; the tape of tape.py replaces a CUDA graph.

Tensors that graphs read live as long as the graphs, and no longer. The tape holds none: see `tape.Borrowed`.
"""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import BLOCKS, DRAFTERS, LEARNERS, finish, tiny_drafter, tiny_target
from tape import Interpreted, Tape
from test_overlap import SAMPLED, assert_same, outcome
from torch.multiprocessing.reductions import StorageWeakRef

from specdec import Engine, Recorder, Sampling, ops
from specdec.cli import session
from specdec.cli.commands import parse
from specdec.contracts import Drafter
from specdec.drafters import ngram
from specdec.engine import batch as batches
from specdec.engine import executor, graphs
from specdec.engine.trace_files import read_trace, write_trace
from specdec.model import rope
from specdec.model.hf_target import TransformersTarget
from specdec.model.layers import RMSNorm
from specdec.model.target import Target
from specdec.ops.rms_norm import reference
from specdec.trees import BlockTree, Chain, DynamicTree, SampledTree, StaticTree
from specdec.verify import VERIFIERS, make_verifier

POLICIES = {
    "chain": Chain(3),
    "dynamic": DynamicTree(3, 3, 9),
    "static": StaticTree([[0], [1], [0, 0], [0, 2], [1, 0], [0, 2, 0]]),
    "sampled": SampledTree((2, 2)),
    "block": BlockTree(4, 5, 14),
}
CAPTURABLE = [*LEARNERS, "draft-model", *BLOCKS, "pard2", "lookup", "suffix"]
CASES = [(policy, drafter) for policy in [*POLICIES][:4] for drafter in CAPTURABLE] + [("block", "dflash")]
# Rows that have ended are carried along, and all levels drafted, as in recorded rounds.
launching = partial(Engine, compact=False, abstain=False)
PENALISED = Sampling(0.5, repetition_penalty=1.5, frequency_penalty=0.5)
SHORT = {"prompts": [[3, 5, 7], [1]], "max_new_tokens": [9, 12]}


def parts(drafter: str = "eagle3", policy: str = "dynamic"):
    target = tiny_target()
    return target, DRAFTERS[drafter](target), POLICIES[policy]


@pytest.fixture(params=[Tape, Interpreted], ids=["captured", "compiled"])
def backend(request, unpacked) -> Tape | Interpreted:
    """Records rounds as a CUDA graph would, or as they are compiled."""
    return request.param()


def assert_as_launched(backend, *parts_, **how) -> None:
    """Compare an engine that records rounds with one that launches them."""
    assert_same(outcome(Engine(*parts_, graphs=backend, abstain=False), **how), outcome(launching(*parts_), **how))


@pytest.mark.matrix
@pytest.mark.parametrize(("policy", "drafter"), CASES)
def test_a_record_does_what_the_round_does(policy, drafter, backend):
    target, drafter, policy = parts(drafter, policy)
    sampling = SAMPLED if policy.samples or policy.topk == 1 else Sampling()
    assert_as_launched(backend, target, drafter, policy, sampling=sampling, **SHORT)
    assert backend.captures == 1
    if isinstance(backend, Tape):
        assert len(backend.rows) > 4
    else:  # the graph computes what is drawn
        nodes = [str(node.target) for node in backend.made[0].module.graph.nodes]
        assert not any("rand" in name or "exponential" in name for name in nodes)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_rule(verifier, backend):
    target, rule = tiny_target(), make_verifier(verifier)
    policy = SampledTree((1, 1) if rule.chains_only else (2, 2))
    parts_ = target, tiny_drafter(target, draft_vocab=8), policy, rule
    assert_as_launched(backend, *parts_, sampling=SAMPLED, **SHORT)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_plain_decoding(rows, sampling, backend):
    how = {"prompts": [[3, 5, 7], [1]][:rows], "max_new_tokens": 12, "sampling": sampling, "logprobs": True}
    assert_as_launched(backend, tiny_target(), **how)


@pytest.mark.parametrize("window", [4, 200])
def test_all_lengths(window, backend):
    """Some layers of the target see a window. One compiled graph serves all lengths, with and without a mask."""
    plain = tiny_target()
    target = Target(replace(plain.config, sliding=(True, False, True), window=window)).eval()
    target.load_state_dict(plain.state_dict())
    parts_ = target, tiny_drafter(target), POLICIES["dynamic"]
    recorded = Engine(*parts_, graphs=backend)
    for length, new in ((1, 40), (100, 20), (200, 12)):
        how = {"prompts": [([3, 5] * 100)[:length]], "max_new_tokens": new, "eos": frozenset()}
        assert_same(outcome(recorded, **how), outcome(launching(*parts_), **how))
    if isinstance(backend, Interpreted):
        (graph,) = backend.made
        assert len(graph.inputs[0]) == recorded.graphs.batch.room == target.config.context
        (bound,) = (node for node in graph.module.graph.nodes if node.target is torch.ops.aten.sym_size.int)
        assert bound.users, "the graph reads all slots at every length"


def test_a_graph_serves_all_that_fits_and_no_more(monkeypatch):
    """Prompts, limits, seeds, penalties and noise are inputs. Another program, more rows, longer texts, new weights and
    other kernels need new graphs."""
    target = tiny_target(layers=1, context=600)
    drafter, policy = DRAFTERS["eagle3"](target), POLICIES["dynamic"]
    recorded, plain = Engine(target, drafter, policy, graphs=Tape()), launching(target, drafter, policy)

    def captures_for(**how) -> int:
        before = recorded.graphs.executor.captures
        assert_same(outcome(recorded, **(SHORT | how)), outcome(plain, **(SHORT | how)))
        return recorded.graphs.executor.captures - before

    assert captures_for(sampling=SAMPLED) == 1
    assert captures_for(sampling=SAMPLED, prompts=[[1, 2], [6, 7, 8, 9]], max_new_tokens=[9, 4], seed=4) == 0
    rounds = recorded.graphs.batch
    outcome(recorded, sampling=SAMPLED, **SHORT)
    assert drafter.cache is rounds.tensors.draft_cache
    for number, penalty in enumerate((1.5, 3.0)):
        samplings = [Sampling(0.5, repetition_penalty=penalty), Sampling(1.0, frequency_penalty=penalty / 2)]
        assert captures_for(sampling=samplings, logprobs=True) == 1 - number
    for temperature in (0.7, 0.9):  # that of all rows is part of the program
        assert captures_for(sampling=Sampling(temperature)) == 1
    assert captures_for() == 1
    assert captures_for(eos=frozenset({4, 9})) == 0
    assert recorded.graphs.batch is rounds
    assert captures_for(prompts=[[3], [5], [7]], max_new_tokens=4) == 1
    assert captures_for(prompts=[[3] * 300], max_new_tokens=4) == 1
    assert recorded.graphs.batch.room == 512
    with torch.no_grad():
        drafter.fc.weight.mul_(0.5)
    assert captures_for() == 1
    target.norm.weight = torch.nn.Parameter(target.norm.weight.detach() * 1.5)
    assert captures_for() == 1
    try:
        ops.use("torch", "commit")
        assert captures_for() == 1
    finally:
        ops.use("auto")


class Forgetful(type(tiny_drafter(tiny_target()))):
    """A drafter that replaces a static tensor in every round."""

    def extend(self, *inputs):
        state = super().extend(*inputs)
        self.cache.lens = self.cache.lens.clone()
        return state


def test_graphs_of_each_length_that_a_dropped_engine_does_not_leave(monkeypatch):
    monkeypatch.setattr(executor, "STEP", 8)
    monkeypatch.setattr(graphs, "STEP", 8)
    assert [executor.buckets(room) for room in (5, 8, 50)] == [[5], [8], [8, 16, 32, 50]]
    target = tiny_target(layers=1)
    recorded = Engine(target, graphs=Tape())
    how = {"prompts": [[3, 5, 7], [1]], "max_new_tokens": 40, "eos": frozenset()}
    assert_same(outcome(recorded, **how), outcome(launching(target), **how))
    assert {key[0] for key in recorded.graphs.batch.graphs} == {*recorded.graphs.batch.buckets} == {8, 16, 32, 48}
    cache = weakref.ref(recorded.graphs.batch.cache)
    gc.disable()
    try:
        del recorded
        assert cache() is None
    finally:
        gc.enable()


def test_the_tape_tells_a_round_that_is_no_function_of_static_tensors():
    target, drafter, policy = parts()
    expected = outcome(launching(target, drafter, policy), **SHORT)
    drafter.__class__ = Forgetful
    assert_same(outcome(launching(target, drafter, policy), **SHORT), expected)
    with pytest.raises(AssertionError):
        assert_same(outcome(Engine(target, drafter, policy, graphs=Tape()), **SHORT), expected)


def test_what_cannot_be_captured_is_said_or_left_alone(monkeypatch):
    target = tiny_target()
    lookup = ngram.create(target)
    monkeypatch.setattr(ngram.NGram, "capturable", False)
    with pytest.raises(ValueError, match=r"CUDA graphs need a GPU, and the target is on the cpu; decode without"):
        Engine(target, graphs=True)
    with pytest.raises(ValueError, match=r"NGram cannot be captured: .* round to round; decode without graphs"):
        Engine(target, lookup, Chain(3), graphs=Tape())
    with pytest.raises(ValueError, match=r"read late: overlap=False needs graphs=False"):
        Engine(target, graphs=Tape(), overlap=False)
    for parts_ in ((target,), (target, lookup, Chain(3))):
        assert Engine(*parts_).graphs is None
        assert not Engine(*parts_).overlap
    assert graphs.obstacle(target, None) is None
    assert not TransformersTarget.capturable
    assert "no drafter of ours" in graphs.obstacle(target, type("no drafter of ours", (Drafter,), {})())


def test_the_command_can_do_without(monkeypatch):
    reported = []
    monkeypatch.setattr(session, "Engine", lambda *parts, graphs, compile, **how: reported.append((graphs, compile)))
    given = ["--prompt", "one", "--topk", "1", "--steps", "2"]  # without a tree all trees would be compiled and timed
    for flags in ([], ["--no-graphs"], ["--compile"]):
        session.Session(parse("generate", [*given, *flags]))
    assert reported == [(None, False)] * 2 + [(False, False)] * 2 + [(None, True)] * 2


def test_a_recorded_run_is_traced(tmp_path, backend):
    """The time of recording is not part of the rounds' time."""
    parts_, reported = parts(), []
    for graphs_ in (backend, None):
        recorder = Recorder()
        how = {"max_new_tokens": 12, "observer": recorder}
        result = Engine(*parts_, graphs=graphs_).generate([[3, 5, 7], [1]], **how)
        write_trace(recorder.trace, tmp_path / "trace")
        rounds = [r for row in read_trace(tmp_path / "trace").rows for r in row.rounds]
        reported.append([(r.path, r.emitted, r.tree.tokens.tolist()) for r in rounds])
        if isinstance(graphs_, Interpreted):
            assert {part for r in rounds for part in r.seconds} == {"round", "host"}
            assert result.parts["capture"] > 0
            assert result.parts["round"] < result.decode_seconds < result.seconds - result.parts["capture"]
    assert reported[0] == reported[1]


TREE = POLICIES["dynamic"]


class Settling(RMSNorm):
    """A norm that replaces its frozen function at its second call."""

    calls = 0

    def bind(self):
        self.calls = 0
        return super().bind()

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            self.frozen = reference(self.weight.clone(), self.eps)
        return super().forward(x)


def test_graphs_hold_what_the_warm_up_has_made():
    """Also after another engine has frozen the modules again."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.norm.__class__ = Settling
    recorded, plain = Engine(target, drafter, TREE, graphs=Tape()), launching(target, drafter, TREE)
    for _ in range(2):
        assert_same(outcome(recorded, **SHORT), outcome(plain, **SHORT))
    assert recorded.graphs.executor.captures == 1


def test_another_engine_may_replace_the_tables_of_positions(monkeypatch):
    monkeypatch.setattr(rope, "GROWTH", 64)
    target = tiny_target(context=600)
    alone = Engine(target).generate([[3, 5, 7]], max_new_tokens=12).rows[0].tokens
    engine = Engine(target, graphs=Tape())
    engine.reserve(1, 20)
    sequence = engine.add([3, 5, 7], max_new_tokens=12)
    for _ in range(4):
        engine.step()
    before = target.ropes[0].table.data_ptr()
    Engine(target).generate([[1] * 500], max_new_tokens=2)
    assert target.ropes[0].table.data_ptr() != before
    finish(engine)
    assert sequence.tokens == alone


def test_settings_are_dropped_with_their_graphs(monkeypatch):
    """An engine keeps the settings of its graphs and the present ones, however many it meets."""
    monkeypatch.setattr(batches, "MOST", 2)
    target = tiny_target(layers=1)
    parts, counts = (target, tiny_drafter(target), TREE), []
    recorded, plain = Engine(*parts, graphs=Tape()), launching(*parts)
    penalised = [Sampling(0.5, repetition_penalty=1.5), Sampling(1.0, frequency_penalty=0.5)]
    for step, sampling in enumerate((penalised, SAMPLED, Sampling(), Sampling(0.7), penalised)):
        how = SHORT | {"sampling": sampling, "eos": frozenset(range(11, 11 + step % 5))}
        assert_same(outcome(recorded, **how), outcome(plain, **how))
        batch = recorded.graphs.batch
        assert len(batch.graphs) <= 2
        assert set(batch.tensors.kinds) <= {key[1] for key in batch.graphs} | {batch.tensors.kind}
        if (penalties := batch.tensors.settings.penalties) is not None:
            counts.append(StorageWeakRef(penalties.counts.untyped_storage()))
    assert [ref.expired() for ref in counts] == [True, False]
