"""Reading one round late changes nothing but the time: same text, same traces, same trees."""

import random
from types import SimpleNamespace

import pytest
import torch
from helpers import DRAFTERS, save_hf, tiny_drafter, tiny_target
from hydra.utils import instantiate
from tape import NoHostSync
from test_conf_matrix import DRAFTED, PAIRS, fresh_drafter, load

from specdec.drafters import eagle3
from specdec.engine.batch import Batch, Progress
from specdec.engine.clock import Clock, SilentClock
from specdec.engine.engine import Engine
from specdec.engine.overlap import Loop
from specdec.engine.round import RoundOutput
from specdec.engine.sequence import Sequence
from specdec.model.hf_target import TransformersTarget
from specdec.structs import Sampling
from specdec.trees import DynamicTree

PROMPTS, LIMITS, EOS = [[3, 5, 7, 2], [1], [4, 4, 9, 8, 7, 6, 1]], [17, 30, 5], frozenset({4, 9})
SAMPLED = Sampling(0.8, 5, 0.9, 0.02)


class Watcher:
    """An observer that keeps what it sees: of every report the numbers of its rows, and then what it says of them."""

    def __init__(self):
        self.seen, self.numbers = [], {}

    def __call__(self, report):
        if report.prefill:
            self.numbers |= {row: len(self.numbers) + i for i, row in enumerate(report.rows)}
        rows = [self.numbers[row] for row in report.rows]
        made = [rows, report.emitted, report.accepted, [row.finish for row in report.rows]]
        if report.tree is not None:
            tree = report.tree
            parts = tree.tokens, tree.parents, tree.ancestors, tree.logq, report.verdict.path, report.logits
            made += [x.clone() for x in parts]
        self.seen.append(made)


def outcome(engine: Engine, prompts=PROMPTS, **how) -> tuple:
    """All that a call tells: of its rows, and of every round."""
    watcher = Watcher()
    rows = engine.generate(prompts, observer=watcher, **({"max_new_tokens": LIMITS, "eos": EOS} | how)).rows
    return [(row.tokens, row.finish, row.trace) for row in rows], [row.logprobs for row in rows], watcher.seen


def assert_same(left: tuple, right: tuple) -> None:
    """Real numbers may differ by rounding: attention sums over as many slots as the bound says, hidden ones included,
    and the bound of a round that is launched early is wider. Logits of these models are of the order of 10."""
    assert left[0] == right[0]
    for a, b in zip(left[1], right[1], strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, abs=1e-4)
    running = left[2][0][0]  # what is computed for rows that have ended does not matter
    for a, b in zip(left[2], right[2], strict=True):
        ours, theirs = ([seen[0].index(row) for row in running] for seen in (a, b))
        for x, y in zip(a[1:4], b[1:4], strict=True):
            assert [x[row] for row in ours] == [y[row] for row in theirs]
        for x, y in zip(a[4:], b[4:], strict=True):
            torch.testing.assert_close(x[ours], y[theirs], rtol=0, atol=1e-4)
        running = [row for row, at in zip(running, ours, strict=True) if a[3][at] is None]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("drafter", "tree", "verifier"), [(d, t, v) for d, t in DRAFTED for tree, v in PAIRS if tree == t]
)
def test_as_the_loop_that_reads_at_once(drafter, tree, verifier):
    """Rows of three lengths and three limits, of which some end early. Greedily, rules do not differ."""
    target = tiny_target(vocab=11)
    parts = fresh_drafter(drafter, target), instantiate(load("tree", tree)), instantiate(load("verifier", verifier))
    once, late = Engine(target, *parts, graphs=False), Engine(target, *parts, graphs=False, overlap=True)
    for sampling in (Sampling(), SAMPLED) if verifier == "match" else (SAMPLED,):
        expected = outcome(once, sampling=sampling)
        assert {row[1] for row in expected[0]} >= {"eos"}
        assert_same(outcome(late, sampling=sampling), expected)


def test_what_only_the_host_knows():
    """Penalties, log-probabilities, samplings by row, and rows that a stop ends, which the device goes on with."""

    class Third:
        def __init__(self):
            self.count = 0

        def add(self, token: int) -> bool:
            self.count += 1
            return self.count == 3

    target = tiny_target(vocab=11)
    parts = tiny_drafter(target, draft_vocab=8), DynamicTree(3, 3, 9)
    samplings = [Sampling(repetition_penalty=1.3), SAMPLED, Sampling(0.7, frequency_penalty=0.5)]
    told = []
    for late in (False, True):
        engine = Engine(target, *parts, overlap=late)
        stops = [None, Third(), None]
        told.append(outcome(engine, sampling=samplings, stop=stops, logprobs=True, eos=frozenset()))
    assert_same(told[1], told[0])
    assert [row[1] for row in told[0][0]] == ["length", "stop", "length"]


def test_a_target_of_transformers_too(tmp_path):
    target = TransformersTarget(save_hf(tmp_path, "gpt_neox"))
    for parts in ((), (eagle3.create(target).eval(), DynamicTree(3, 3, 9))):
        told = [outcome(Engine(target, *parts, overlap=late), max_new_tokens=20) for late in (False, True)]
        assert_same(told[1], told[0])


def test_the_device_ends_rows_as_the_host_does():
    """`Progress` against `Sequence.add`, on random rounds."""
    choose = random.Random(0)
    for _ in range(200):
        eos = [frozenset(choose.sample(range(6), choose.randint(0, 2))) for _ in range(4)]
        rows = [Sequence([0], choose.randint(1, 9), eos=own) for own in eos]
        for row in rows:
            row.add([choose.randrange(6)])
        progress = Progress(rows, torch.device("cpu"))
        for _ in range(4):
            tokens = [[choose.randrange(6) for _ in range(3)] for _ in rows]
            n = [choose.randint(1, 3) for _ in rows]
            progress.settle(torch.tensor(tokens), torch.tensor(n))
            for row, emitted, count in zip(rows, tokens, n, strict=True):
                if row.finish is None:
                    row.add(emitted[:count])
            assert progress.active.tolist() == [row.finish is None for row in rows]


class Script:
    """A batch of one row, whose rounds emit what they are told, and note when they were launched and with which
    `max_len`."""

    device = torch.device("cpu")
    round = SimpleNamespace(path=3)
    settings = SimpleNamespace(sampling=Sampling())

    def __init__(self, row: Sequence, rounds: list[int]):
        self.sequences, self.rounds, self.log = [row], iter(rounds), []
        self.captured, self.clock = False, SilentClock()

    def going(self) -> list[Sequence]:
        return [row for row in self.sequences if row.finish is None]

    def launch(self, max_len: int, ended) -> RoundOutput:
        n = next(self.rounds)
        self.log.append(f"launch {max_len}")
        return RoundOutput(torch.ones(1, 3, dtype=torch.int64), torch.tensor([n]))


def follow(row: Sequence, rounds: list[int]) -> list[str]:
    script = Script(row, rounds)
    loop = Loop(script, lag=1)
    while loop.next() is not None:
        script.log.append(f"read {row.trace.accepted[-1] + 1}")
    return script.log


def test_a_round_is_launched_before_the_one_before_it_is_read():
    row = Sequence([0, 0], 8, tokens=[1])
    log = follow(row, [1, 3, 3, 3])
    # Two tokens are known, one of them not in the cache; an unread round may add three.
    assert log == ["launch 2", "launch 5", "read 1", "launch 6", "read 3", "launch 9", "read 3"]
    assert row.finish == "length"


def test_no_round_is_launched_that_must_be_void():
    """The unread round brings the last token, whatever else it brings."""
    row = Sequence([0, 0], 3, tokens=[1])
    assert follow(row, [1, 3]) == ["launch 2", "launch 5", "read 1", "read 3"]
    assert row.tokens == [1, 1, 1]


def test_one_round_is_void_after_a_text_that_ends_early():
    row = Sequence([0], 9, tokens=[2], eos=frozenset({1}))
    assert follow(row, [3, 3]) == ["launch 1", "launch 4", "read 3"]
    assert row.tokens == [2, 1]
    assert row.finish == "eos"


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
@torch.inference_mode()
def test_launching_does_not_wait(drafter):
    target = tiny_target()
    engine = Engine(target, *([] if drafter is None else [DRAFTERS[drafter](target), DynamicTree(3, 3, 9)]))
    batch = Batch(engine.round, 2, 30, Clock(engine.device), overlap=True)
    batch.admit([Sequence(prompt, 20, sampling=SAMPLED, eos=EOS, logprobs=[]) for prompt in ([1, 2, 3], [4])])
    with NoHostSync():
        for max_len in (3, 7):
            batch.launch(max_len, ())
