"""Sequences join a running batch and leave it: nobody's text shows it, and nothing is kept of those that are gone."""

import functools
import gc

import pytest
import torch
from helpers import DRAFTERS, tiny_drafter, tiny_target
from hydra.utils import instantiate
from tape import Tape
from test_conf_matrix import DRAFTED, fresh_drafter, load, shared_target

from specdec.contracts import Drafter, DraftState
from specdec.engine.engine import Engine
from specdec.engine.recorder import Recorder
from specdec.model.cache import KVCache
from specdec.sampling.likely import top_logprobs
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, SampledTree, StaticTree
from specdec.trees.optimal import measure_acceptance

PROMPTS = [[3, 5, 7, 2], [1], [4, 4, 9, 8, 7, 6, 1], [2, 2], [6, 1, 3], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]]
LIMITS = [9, 14, 3, 11, 1, 8]
EOS = frozenset({4})


def live_bytes(objects: list) -> int:
    """Bytes of the tensors among all objects of a process, packed weights aside."""
    tensors = [x for x in objects if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


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


def alone(target, sampling: Sampling | None = None) -> list[tuple]:
    plain = Engine(target)
    how = {"sampling": sampling, "eos": EOS}
    rows = [plain.generate([p], max_new_tokens=n, **how).rows[0] for p, n in zip(PROMPTS, LIMITS, strict=True)]
    return [(row.tokens, row.finish) for row in rows]


@functools.cache
def texts_alone() -> list[tuple]:
    return alone(shared_target())


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapped"])
@pytest.mark.parametrize(("drafter", "tree"), [*DRAFTED, (None, None)])
def test_a_row_that_joins_has_the_text_that_it_has_alone(drafter, tree, overlap):
    """Three rows for six sequences. They come before the first round, between rounds, and when there is no room."""
    target = shared_target()
    parts = [fresh_drafter(drafter, target), instantiate(load("tree", tree))] if drafter else []
    rows = decode(Engine(target, *parts, overlap=overlap), 3, [0, 0, 2, 3, 3, 5])
    assert [(row.tokens, row.finish) for row in rows] == texts_alone()
    assert {row.finish for row in rows} >= {"length"}


@pytest.mark.parametrize("drafter", ["eagle3", "mtp-two-heads-pre-norm", "medusa", "draft-model"])
def test_into_the_rows_of_recorded_rounds(drafter):
    """Who joins takes the place of one that has ended, or one behind the others. Rounds are recorded for two rows and
    for three."""
    target = tiny_target()
    engine = Engine(target, DRAFTERS[drafter](target), DynamicTree(3, 3, 9), graphs=Tape())
    rows = decode(engine, 3, [0, 0, 2, 3, 3, 5])
    assert [(row.tokens, row.finish) for row in rows] == alone(target)
    assert engine.graphs.backend.captures == 2


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
    while engine.step() is not None:
        pass
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
            while engine.step() is not None:
                pass
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
    while engine.step() is not None:
        pass
    assert (len(row.tokens), row.finish) == (6, "context")
    assert engine.step() is None


def test_room_is_what_was_reserved_and_not_what_recorded_rounds_have_beside():
    target = tiny_target()
    for graphs in (False, Tape()):
        engine = Engine(target, graphs=graphs)
        engine.reserve(1, 20)
        row = engine.add([1, 2], max_new_tokens=100, eos=frozenset())
        while engine.step() is not None:
            pass
        assert (len(row.tokens), row.finish) == (18, "context")
        with pytest.raises(ValueError, match="the prompt has 20 tokens, room was reserved for 20, new ones included"):
            engine.add([1] * 20)


def test_a_prefill_that_fails_can_be_repeated_or_given_up(monkeypatch):
    """Nothing of it is left, and those that were to join wait on."""
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), Chain(2))
    engine.reserve(1, 40)
    engine.add(PROMPTS[0], max_new_tokens=1, eos=frozenset())
    engine.step()
    row, other = (engine.add(PROMPTS[i], max_new_tokens=9, eos=frozenset()) for i in (1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(engine.drafter, "admit", lambda *_: pytest.fail("out of memory"))
        with pytest.raises(pytest.fail.Exception):
            engine.step()
    engine.abort(other)
    while engine.step() is not None:
        pass
    expected = Engine(target).generate([PROMPTS[1]], max_new_tokens=9, eos=frozenset()).rows[0]
    assert (row.tokens, row.finish, other.tokens) == (expected.tokens, "length", [])


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
    while engine.step() is not None:
        pass
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


class Block(Drafter):
    """Guesses three tokens at once: slot k says what token, of those seen, comes k+1 behind the root; by a fixed table
    of the root, so that another tree shows other tokens."""

    block = 3

    def __init__(self, target, seed: int = 0):
        super().__init__()
        self.vocab = tiny_drafter(target).vocab
        g = torch.Generator().manual_seed(seed)
        self.table = torch.randn(target.config.vocab, self.block, target.config.vocab, generator=g) * 3

    def extend(self, feats, tokens, n, max_len) -> DraftState:
        last = tokens.gather(1, (n - 1).clamp(min=0)[:, None]).squeeze(1)
        logits = self.table[last]
        return DraftState(torch.zeros(*logits.shape[:2], 0), logits)

    def step(self, *_) -> DraftState:
        pytest.fail("a block needs no step")


BLOCK_TREES = [
    Chain(3),
    DynamicTree(2, 3, 8),
    StaticTree([[0], [1], [0, 0], [0, 0, 1], [1, 0]]),
    SampledTree((2, 2, 1)),
]


@pytest.mark.parametrize("tree", BLOCK_TREES, ids=lambda tree: type(tree).__name__)
def test_a_block_takes_every_tree_without_a_step(tree):
    target = tiny_target()
    drafter, trees = Block(target), []
    engine = Engine(target, drafter, tree)
    result = engine.generate(PROMPTS, max_new_tokens=LIMITS, eos=EOS, observer=lambda r: trees.append((r.rows, r.tree)))
    assert [(row.tokens, row.finish) for row in result.rows] == alone(target)
    for _, grown in trees[1:]:
        for tokens, parents, depth in zip(grown.tokens, grown.parents, grown.depth, strict=True):
            for node in range(1, len(tokens)):
                if isinstance(tree, Chain):
                    best = top_logprobs(drafter.table[tokens[0], depth[node] - 1], 1)[1]
                    assert tokens[node] == best
                assert depth[node] == depth[parents[node]] + 1


def test_acceptance_of_a_block_is_measured_without_a_step():
    target = tiny_target()
    outputs = [row.tokens for row in Engine(target).generate(PROMPTS, max_new_tokens=8, eos=frozenset()).rows]
    accept = measure_acceptance(target, Block(target), PROMPTS, outputs, 3, target.config.vocab)
    torch.testing.assert_close(accept.sum(1), torch.ones(3))


def test_a_block_says_how_deep_a_tree_may_be():
    target = tiny_target()
    with pytest.raises(ValueError, match="steps is 4, but this drafter guesses 3 tokens ahead at most"):
        Engine(target, Block(target), Chain(4))
